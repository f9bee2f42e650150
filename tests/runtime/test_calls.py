"""A call that fails says which process was lost, and at what."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
    WorkerCrashedError,
)

from qwen35_trainer.runtime import calls
from qwen35_trainer.runtime.calls import ActorLost, answer, answers

BROKEN = RuntimeError("Connection closed by peer [10.0.0.7]:41234")


async def raising(cause: Exception) -> None:
    """As Ray does with what a call, or the fetching of its arguments, raised."""
    raise RayTaskError("load", "Traceback …", cause).as_instanceof_cause()


async def failed(cause: Exception) -> Exception:
    call: Any = raising(cause)
    with pytest.raises((ValueError, ActorLost)) as raised:
        await answer(call, of="rollout-0", act="loading version 3", seconds=60)
    return raised.value


async def test_what_the_call_raised_is_raised_here():
    error = ValueError("no such tensor")
    assert await failed(error) is error


async def test_weights_whose_trainer_was_lost_are_a_loss_and_no_fault_of_who_reads_them():
    error = await failed(OwnerDiedError("00" * 28, b"", ""))
    assert isinstance(error, ActorLost)
    assert str(error) == "rollout-0 failed at loading version 3: the process that owned its arguments has ended"


async def gone() -> None:
    """As Ray does with a call of an actor whose process is gone, once it has noticed."""
    await asyncio.sleep(0.01)
    raise ActorDiedError


async def test_a_rank_that_complains_of_a_lost_one_does_not_hide_the_loss():
    ranks: Any = [raising(BROKEN), gone()]
    with pytest.raises(ActorLost, match=r"^the train pool was lost during training a batch: "):
        await answers(ranks, of="the train pool", act="training a batch", seconds=60)


KILLED = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: fcc7) was \
21.74GB used / 23.54GB limit (0.923351)
OOM kill reason: Memory usage 24087445504B exceeded threshold of 24012685312B (95.0% of 25276510208B limit)
Object store memory usage: [- objects spillable: 7
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
23204\t12.06\tray::TrainWorker.train
23096\t2.14\tray::RolloutWorker.exchange
22643\t0.85\t/venv/bin/python -m qwen35_trainer.cli run /runs/a-very-long-name-of-a-folder/manifest.yaml
23095\t0.47\tray::Driver.follow
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/ … RAY_memory_usage_threshold
"""


async def killed(text: str) -> None:
    """As Ray 2.56 does with a call of an actor that it has killed for memory."""
    await asyncio.sleep(0.01)
    raise OutOfMemoryError(text)


@pytest.mark.parametrize("complains", [False, True], ids=["alone", "after a peer's complaint"])
async def test_a_process_that_was_killed_for_memory_is_named_with_the_largest_ones_and_what_to_lower(complains):
    ranks: Any = [raising(BROKEN), killed(KILLED)] if complains else [killed(KILLED)]
    with pytest.raises(calls.ActorOutOfMemory) as raised:
        await answers(ranks, of="the train pool", act="training a batch", seconds=60)
    assert str(raised.value) == (
        "the train pool was ended during training a batch, because its machine ran out of memory (24.1 of 25.3 GB used): "
        "ray::TrainWorker.train 12.06 GB, ray::RolloutWorker.exchange 2.14 GB, "
        "/venv/bin/python -m qwen35_trainer.cli run /runs/a-very-long 0.85 GB. Lower train.batch.microBatchSequences, "
        "rollout.maxSequencesPerReplica or data.maxResponseTokens, train adapters (train.lora), or use more memory"
    )


async def test_a_kill_for_memory_without_details_is_still_reported():
    with pytest.raises(calls.ActorOutOfMemory, match=r"because its machine ran out of memory\. Lower train"):
        await answer(killed("killed"), of="train-0", act="training a batch", seconds=60)  # type: ignore[arg-type]


async def test_a_failure_of_one_rank_is_its_own_when_no_other_was_lost():
    ranks: Any = [raising(BROKEN), asyncio.sleep(0.01)]
    with pytest.raises(RuntimeError) as raised:
        await answers(ranks, of="the train pool", act="training a batch", seconds=60)
    assert raised.value is BROKEN


async def test_a_rank_that_waits_for_a_failed_one_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "LOSS_DETECTION_SECONDS", 0.01)
    ranks: Any = [raising(BROKEN), asyncio.Event().wait()]
    with pytest.raises(RuntimeError) as raised:
        await answers(ranks, of="the train pool", act="training a batch", seconds=60)
    assert raised.value is BROKEN


async def lost(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [NodeDiedError("The node died."), ObjectLostError("00" * 28, b"", ""), WorkerCrashedError(), GetTimeoutError()],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_of_ray_that_names_no_process_is_a_loss_too(error):
    """All actors of a run are called through here: none of Ray's errors ends it without a name."""
    with pytest.raises(ActorLost, match=r"^rollout-0 was lost during generating: "):
        await answer(lost(error), of="rollout-0", act="generating", seconds=60)  # type: ignore[arg-type]


async def test_an_actor_that_cannot_be_reached_is_told_from_one_that_has_ended():
    with pytest.raises(calls.ActorUnreachable, match=r"^rollout-0 cannot be reached during generating: "):
        await answer(lost(ActorUnavailableError("blip", None)), of="rollout-0", act="generating", seconds=60)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [60.0, None])
async def test_a_time_out_inside_of_a_call_is_what_the_call_raised(seconds):
    """Not that it was not answered."""
    error = TimeoutError("the disk")
    with pytest.raises(TimeoutError) as raised:
        await answer(raising(error), of="train-0", act="writing a checkpoint", seconds=seconds)  # type: ignore[arg-type]
    assert raised.value is error


async def test_an_actor_that_does_not_answer_is_named_with_the_deadline(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        calls.Stalled, match=r"^the train pool \(train-1\) did not finish training a batch within 0.01 s;"
    ):
        await answers(
            [asyncio.sleep(0), asyncio.Event().wait()],  # type: ignore[list-item]
            of="the train pool",
            act="training a batch",
            seconds=0.01,
            names=["train-0", "train-1"],
        )
