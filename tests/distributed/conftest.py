"""Groups of one, two and four processes, each started once."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.group import Group


@pytest.fixture(scope="package")
def groups() -> Iterator[Callable[[int], Group]]:
    """groups(2): two ranks. They end with this package: idle groups keep the cores busy (rank.py)."""
    started: dict[int, Group] = {}

    def of(ranks: int) -> Group:
        return started.setdefault(ranks, Group(ranks))

    yield of
    for group in started.values():
        group.stop()
