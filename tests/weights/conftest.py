"""Fixtures of the transports."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.weights.ways import WAYS, Way, ways


@pytest.fixture
def open_way(tmp_path: Path) -> Iterator[Callable[[str], Way]]:
    """Sets up one of WAYS."""
    with ways(tmp_path) as opened:
        yield opened


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, open_way: Callable[[str], Way]) -> Way:
    """Each transport in turn."""
    return open_way(request.param)
