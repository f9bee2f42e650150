"""When the processes of a group end."""

import pytest

from tests.distributed import group as groups_of_ranks
from tests.distributed.group import Group


def _pids(group: Group) -> list[int]:
    return [process.pid for process in group.processes]


def test_a_group_outlives_what_all_its_ranks_refuse(groups) -> None:
    group = groups(2)
    pids = []
    for _ in range(2):
        with pytest.raises(AssertionError, match="ValueError: refused"):
            group.run("refuse", ranks=[0, 1])
        pids.append(_pids(group))
    assert len(pids[0]) == 2
    assert pids[0] == pids[1]


def test_a_group_ends_when_a_rank_stays_in_what_another_refuses(monkeypatch) -> None:
    monkeypatch.setattr(groups_of_ranks, "GRACE_SECONDS", 0.1)
    group = Group(2)
    with pytest.raises(AssertionError, match=r"rank 1: (?s:.*)ValueError: refused"):
        group.run("refuse", ranks=[1])
    assert not group.processes
