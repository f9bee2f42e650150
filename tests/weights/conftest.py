"""Fixtures of the transports."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen35_trainer.weights.transports import nixl_agent
from tests.weights.ways import AVAILABLE, WAYS, Way, ways

# UCX would use every interface, and fail for one that another test removes meanwhile.
os.environ.setdefault("UCX_NET_DEVICES", "lo")


@pytest.fixture
def open_way(tmp_path: Path) -> Iterator[Callable[[str], Way]]:
    """Sets up one of WAYS."""
    with ways(tmp_path) as opened:
        yield opened


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, open_way: Callable[[str], Way]) -> Way:
    """Each transport in turn."""
    if request.param not in AVAILABLE:
        pytest.skip(f"{nixl_agent.PACKAGE} is not installed")
    return open_way(request.param)
