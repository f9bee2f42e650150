"""What a job leaves in a process that trains with megatron-core."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import group as groups_of_ranks
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, spec_of
from tests.distributed.test_parity import TEXT
from tests.engines.megatron.test_prediction_head import EXPERTS, samples, spec_in

pytestmark = pytest.mark.processes
FEW = 8
"""More threads than serve the connections of a job that makes no engine."""


def train(group: Group, **spec: Any) -> None:
    group.run("train", spec=spec_of(2, engine="Megatron", **spec), batches=[batch_of(8, 0, supervised=True)])


def train_head(group: Group, place: Path) -> None:
    place.mkdir()
    spec, _ = spec_in(place, EXPERTS, 2)
    group.run("train", spec=spec, batches=[samples()], folder=place)


TRAININGS: dict[str, Callable[[Group, Path], None]] = {
    "dense": lambda group, _: train(group),
    "router losses": lambda group, _: train(group, random=TEXT["MoE"], router={"zLoss": 0.001}),
    "prediction head with experts": train_head,
}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_connections_of_an_engine_end_with_its_job(
    groups: Callable[[int], Group], tmp_path: Path, name: str
) -> None:
    group = groups(2)
    group.stop()  # a job before may have left some
    for number in range(2):
        TRAININGS[name](group, tmp_path / str(number))
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
