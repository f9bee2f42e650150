"""The records of a run reach the one process that follows it, each once; its replicas draw from random numbers of their own."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.progress.records import FinishRecord
from qwen35_trainer.runtime import driver
from qwen35_trainer.runtime.driver import Broadcast, Driver
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import Job
from qwen35_trainer.runtime.process import Process
from qwen35_trainer.runtime.rollout_worker import RolloutWorker


def records(count: int) -> list[FinishRecord]:
    return [FinishRecord(outcome="Succeeded", message="", time=float(number), wall_time=0.0) for number in range(count)]


def test_the_follower_gets_each_record_once_in_order_however_often_it_calls():
    broadcast, written, received = Broadcast(), records(10), []
    for number, record in enumerate(written):
        broadcast.write(record)
        if number % 3 == 0:
            received += broadcast.after(len(received))
    received += broadcast.after(len(received))
    assert received == written
    assert broadcast.after(len(received)) == ()


def test_an_answer_that_was_lost_is_repeated_with_what_came_since():
    broadcast, written = Broadcast(), records(5)
    broadcast.write(written[0])
    assert broadcast.after(0) == (written[0],)
    for record in written[1:]:
        broadcast.write(record)
    assert broadcast.after(0) == tuple(written), "the follower has not confirmed the first"


def test_records_that_have_arrived_take_no_memory():
    broadcast = Broadcast()
    for seen in range(1000):
        broadcast.write(records(1)[0])
        assert len(broadcast.after(seen)) == 1


def test_a_second_follower_is_refused_by_the_number_of_its_record():
    broadcast = Broadcast()
    for record in records(3):
        broadcast.write(record)
    broadcast.after(2)
    with pytest.raises(ValueError, match="record 1 was dropped"):
        broadcast.after(1)


def test_who_waits_for_records_is_woken_by_each_and_by_the_end():
    broadcast = Broadcast()
    assert not broadcast.changed.is_set()
    broadcast.write(records(1)[0])
    assert broadcast.changed.is_set()
    broadcast.changed.clear()
    broadcast.close()
    assert broadcast.changed.is_set()


@pytest.fixture
def seeds(write, tmp_path, monkeypatch) -> Any:
    """seeds(resume=CHECKPOINT) are those of four replicas of a new attempt, and of one that replaces the first of them."""
    manifest = load_manifest(write(tmp_path, {"rollout.nodes": 4}))
    workers = []

    monkeypatch.setattr(Process, "__init__", lambda *_, **__: None)  # it changes the logging of this process
    for name in ("reuse_freed_tensors", "collect_seldom"):
        monkeypatch.setattr(driver, name, lambda: None)

    def remote(**options: Any) -> Any:
        return lambda worker: SimpleNamespace(remote=lambda *args, **named: started(worker(*args, **named)))

    def started(worker: RolloutWorker) -> MagicMock:
        workers.append(worker)
        return MagicMock()

    monkeypatch.setattr(driver.ray, "remote", remote)

    def attempt(resume: Any) -> list[int]:
        job = Job(
            manifest,
            tmp_path,
            RunFolder(tmp_path / "out"),
            resume,
            started=0.0,
            threads=1,
            updates_total=9,
            vocabulary=9,
            pictures=False,
            end_token=0,
        )
        workers.clear()
        starting = Driver(job, [None])
        for number, name in enumerate([*starting._replica_names, "rollout-0"]):
            starting._spawn(number, name, lane=False)
        return [worker._seed for worker in workers]

    return attempt


def test_no_two_replicas_of_a_run_draw_the_same_samples_though_attempts_resume_one_checkpoint(seeds):
    checkpoint = SimpleNamespace()
    drawn = [*seeds(None), *seeds(checkpoint), *seeds(checkpoint)]
    assert len(drawn) == 15
    assert len(set(drawn)) == 15


def test_a_run_that_begins_again_from_scratch_draws_the_same_samples(seeds):
    assert seeds(None) == seeds(None)
