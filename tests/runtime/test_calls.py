"""A call that fails says which process was lost, and at what."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OwnerDiedError, RayTaskError

from qwen35_trainer.runtime import calls
from qwen35_trainer.runtime.calls import WorkerLost, answer, answers

BROKEN = RuntimeError("Connection closed by peer [10.0.0.7]:41234")


async def raising(cause: Exception) -> None:
    """As Ray does with what a call, or the fetching of its arguments, raised."""
    raise RayTaskError("load", "Traceback …", cause).as_instanceof_cause()


async def failed(cause: Exception) -> Exception:
    call: Any = raising(cause)
    with pytest.raises((ValueError, WorkerLost)) as raised:
        await answer(call, of="rollout-0", act="loading version 3", seconds=60)
    return raised.value


async def test_what_the_call_raised_is_raised_here():
    error = ValueError("no such tensor")
    assert await failed(error) is error


async def test_weights_whose_trainer_was_lost_are_a_loss_and_no_fault_of_who_reads_them():
    error = await failed(OwnerDiedError("00" * 28, b"", ""))
    assert isinstance(error, WorkerLost)
    assert str(error) == "rollout-0 failed at loading version 3: the process that has what it was sent was lost"


async def gone() -> None:
    """As Ray does with a call of an actor whose process is gone, once it has noticed."""
    await asyncio.sleep(0.01)
    raise ActorDiedError


async def test_a_rank_that_complains_of_a_lost_one_does_not_hide_the_loss():
    ranks: Any = [raising(BROKEN), gone()]
    with pytest.raises(WorkerLost, match=r"^the train pool was lost during training a batch: "):
        await answers(ranks, of="the train pool", act="training a batch", seconds=60)


async def test_a_failure_of_one_rank_is_its_own_when_no_other_was_lost():
    ranks: Any = [raising(BROKEN), asyncio.sleep(0.01)]
    with pytest.raises(RuntimeError) as raised:
        await answers(ranks, of="the train pool", act="training a batch", seconds=60)
    assert raised.value is BROKEN


async def test_a_rank_that_waits_for_a_failed_one_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "LOSS_SECONDS", 0.01)
    ranks: Any = [raising(BROKEN), asyncio.Event().wait()]
    with pytest.raises(RuntimeError) as raised:
        await answers(ranks, of="the train pool", act="training a batch", seconds=60)
    assert raised.value is BROKEN
