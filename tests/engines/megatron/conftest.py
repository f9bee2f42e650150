"""Groups of processes that train with megatron-core."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.group import Group


@pytest.fixture(scope="package")
def groups() -> Iterator[Callable[[int], Group]]:
    """groups(2): two ranks. They end with this package."""
    started: dict[int, Group] = {}

    def of(ranks: int) -> Group:
        return started.setdefault(ranks, Group(ranks, "tests.engines.megatron.rank", ["tests.engines.megatron.on_cpu"]))

    yield of
    for group in started.values():
        group.stop()
