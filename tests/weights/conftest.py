"""Fixtures of the transports."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen35_trainer.manifest.publication import TransportName
from tests.weights.ways import WAYS, Way, ways


@pytest.fixture
def open_way(tmp_path: Path) -> Iterator[Callable[[TransportName], Way]]:
    """Sets up a transport."""
    with ways(tmp_path) as opened:
        yield opened


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, open_way: Callable[[TransportName], Way]) -> Way:
    """Each transport in turn."""
    return open_way(request.param)
