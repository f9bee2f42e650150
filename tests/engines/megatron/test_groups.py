"""What a job leaves in a process that trains with megatron-core."""

from collections.abc import Callable

import pytest

from tests.distributed import group as groups_of_ranks
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, spec_of

pytestmark = pytest.mark.processes
FEW = 8
"""More threads than serve the connections of a job that makes no engine."""


def train(group: Group) -> None:
    group.run("train", spec=spec_of(2, engine="Megatron"), batches=[batch_of(8, 0, supervised=True)])


def test_the_connections_of_an_engine_end_with_its_job(groups: Callable[[int], Group]) -> None:
    group = groups(2)
    group.stop()  # a job before may have left some
    for _ in range(2):
        train(group)
    assert max(group.run("threads_of_connections")) <= FEW


def test_a_group_in_which_jobs_leave_many_threads_ends_and_the_next_job_has_another(
    groups: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups(2)
    train(group)
    before = [process.pid for process in group.processes]
    monkeypatch.setattr(groups_of_ranks, "MAX_IDLE_THREADS", -1)
    train(group)
    assert not group.processes
    monkeypatch.undo()
    train(group)
    assert before
    assert not {process.pid for process in group.processes} & set(before)
