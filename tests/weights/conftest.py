"""Fixtures of the transports."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from qwen35_trainer.manifest.publication import TransportName
from qwen35_trainer.weights.transports import nixl_agent
from tests.weights.ways import WAYS, Way, ways

# UCX would use every interface, and fail for one that another test removes meanwhile.
os.environ.setdefault("UCX_NET_DEVICES", "lo")


@pytest.fixture
def open_way(tmp_path: Path) -> Iterator[Callable[[TransportName], Way]]:
    """Sets up a transport."""
    with ways(tmp_path) as opened:
        yield opened


@pytest.fixture(params=get_args(TransportName))
def way(request: pytest.FixtureRequest, open_way: Callable[[TransportName], Way]) -> Way:
    """Each transport in turn."""
    if request.param not in WAYS:
        pytest.skip(f"{nixl_agent.PACKAGE} is not installed")
    return open_way(request.param)
