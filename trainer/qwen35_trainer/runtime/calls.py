"""Calls to Ray actors. Each call can have a deadline, and each error names the actor and what the call does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OwnerDiedError, RayActorError, RayError, RayTaskError
from ray.exceptions import OutOfMemoryError as Killed

from qwen35_trainer.failure_reasons import FailureReason

_MAX_NAMED_PROCESSES = 3
"""Maximum number of processes that an out-of-memory error lists."""
MAX_LOSS_CHARACTERS = 400
"""Maximum number of characters that an error message quotes from Ray's text about a lost process."""
LOSS_DETECTION_SECONDS = 30.0
"""Maximum time to wait, after a call has failed, for Ray's report that a process has ended.

If the pod of the process is gone too, Ray notices the loss only by missed health checks, which takes longest.
"""


class ActorLost(RuntimeError):
    """A call failed because the actor's process, or the process that owned the call's arguments, has ended."""

    failure = FailureReason.WORKER_LOST


class ActorUnreachable(ActorLost):
    """An actor cannot be reached at present. Its process may still run, and may have carried out the call."""


class ActorOutOfMemory(ActorLost):
    """An actor's process was ended because its machine ran out of memory. The message lists the largest processes."""

    failure = FailureReason.OUT_OF_MEMORY


class Stalled(RuntimeError):
    """A call was not answered before its deadline."""

    failure = FailureReason.STALLED


async def answer(call: ray.ObjectRef[Any], *, of: str, act: str, seconds: float | None) -> Any:  # noqa: ANN401  # an actor's result
    """Await the result of one call to an actor.

    of: name of the actor. act: description of what the call does. Error messages contain both texts. seconds: deadline;
    None: no deadline. Raises ActorLost or one of its subclasses when the process has ended or cannot be reached,
    Stalled when the call has not been answered after `seconds`, and any error that the call itself raised.
    """
    return (await answers([call], of=of, act=act, seconds=seconds))[0]


async def answers(
    calls: Sequence[ray.ObjectRef[Any]],
    *,
    of: str,
    act: str,
    seconds: float | None,
    names: Sequence[str] = (),
    field: str = "",
) -> list[Any]:
    """Await the results of calls that run at the same time. The first failed call ends the wait for all others.

    of: name of the actor or the pool. act: description of what the calls do. names: names of the actors, in the order of
    `calls`. Error messages contain these texts. seconds: deadline of all calls; None: no deadline. field: the field of
    the manifest that sets the deadline, for the message; "" if none does. Raises the same errors as `answer`.

    When a process ends, its peers raise an error about a broken connection before Ray reports the lost process. After
    an error, this function therefore waits up to LOSS_DETECTION_SECONDS for Ray's report. If Ray reports a loss, this
    function raises ActorLost instead of the error.
    """
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.wait_for(asyncio.gather(*running), seconds))
    except RayTaskError as error:
        if isinstance(error.cause, OwnerDiedError):
            raise ActorLost(f"{of} failed at {act}: the process that owned its arguments has ended") from error
        if (loss := await _loss(running)) is not None:
            raise _lost(of, act, loss) from error
        raise _cause(error) from error
    except RayError as error:  # also what says nothing about a process: a lost node, an object that was lost with it
        raise _lost(of, act, error) from error
    except TimeoutError as error:  # after Ray's errors, some of which are also TimeoutErrors
        silent = [name for name, call in zip(names, running, strict=False) if call.cancelled()]
        assert seconds is not None, "without a deadline, nothing times out"
        raise stalled(f"{of} ({', '.join(silent)})" if silent else of, act, seconds, field) from error


def stalled(of: str, act: str, seconds: float, field: str = "") -> Stalled:
    """Return the error for a call that was not answered within `seconds`.

    of: name of the actor or actors. act: description of what the call does. field: the field of the manifest that sets
    the limit; "" if none does.
    """
    advice = f". If it was only slow, raise {field}" if field else ""
    return Stalled(
        f"{of} did not finish {act} within {seconds:g} s; its log in the run folder shows what it did last{advice}"
    )


async def _loss(running: Sequence[asyncio.Future[Any]]) -> RayActorError | Killed | None:
    """Wait until Ray reports that one of the calls `running` has lost its process, and return Ray's error.

    Returns None when all calls have ended without such an error, or after LOSS_DETECTION_SECONDS.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LOSS_DETECTION_SECONDS
    while True:
        for call in running:
            if call.done() and isinstance(error := call.exception(), (RayActorError, Killed)):
                return error
        waiting = [call for call in running if not call.done()]
        remaining = deadline - loop.time()
        if not waiting or remaining <= 0:
            return None
        await asyncio.wait(waiting, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)


def _lost(of: str, act: str, loss: RayError) -> ActorLost:
    if isinstance(loss, Killed):
        return ActorOutOfMemory(_out_of_memory(of, act, str(loss)))
    if isinstance(loss, ActorUnavailableError):
        return ActorUnreachable(f"{of} cannot be reached during {act}: {loss_text(loss)}")
    return ActorLost(f"{of} was lost during {act}: {loss_text(loss)}")


def _cause(error: RayTaskError) -> Exception:
    """Return the exception that a call raised in the actor, from Ray's error about it.

    A BaseException that is not an Exception, such as torch's CheckpointException, becomes a RuntimeError with the last
    line of its text.
    """
    if isinstance(error.cause, Exception):
        return error.cause
    return RuntimeError(str(error).strip().splitlines()[-1].strip())


def loss_text(error: RayError) -> str:
    """Return Ray's message about a lost process in one line, without its list of common causes.

    The text is cut after MAX_LOSS_CHARACTERS.
    """
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    return text[:MAX_LOSS_CHARACTERS]


def _out_of_memory(of: str, act: str, ray_message: str) -> str:
    """Return an error message for a process that Ray killed because the machine ran out of memory.

    of: name of the actor. act: its task. ray_message: Ray's message, which contains the memory in use and the largest
    processes. The result adds advice.
    """
    used = re.search(r"Memory usage (\d+)B .* of (\d+)B limit", ray_message)
    machine = f" ({int(used[1]) / 1e9:.1f} of {int(used[2]) / 1e9:.1f} GB used)" if used else ""
    users = re.findall(r"^\d+\t([\d.]+)\t(.+)$", ray_message, re.MULTILINE)[:_MAX_NAMED_PROCESSES]
    held = ", ".join(f"{command.strip()[:60]} {size} GB" for size, command in users)
    return (
        f"{of} was ended during {act}, because its machine ran out of memory{machine}{f': {held}' if held else ''}. "
        "Lower train.batch.microBatchSequences, rollout.maxSequencesPerReplica or data.maxResponseTokens, train adapters "
        "(train.lora), or use more memory"
    )
