"""A call that fails says which process was lost, and at what."""

from typing import Any

import pytest
from ray.exceptions import OwnerDiedError, RayTaskError

from qwen35_trainer.runtime.calls import WorkerLost, answer


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
