"""Calls to actors: each has a deadline, and a failure says which actor failed at what."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError as Killed
from ray.exceptions import OwnerDiedError, RayActorError, RayTaskError

_LARGEST = 3
"""Processes that an error names when memory is short."""
LOSS_SECONDS = 30.0
"""How much later than its peers Ray may learn that a process is gone: by its missed health checks when its pod is gone, too."""


class WorkerLost(RuntimeError):
    """An actor's process ended, or that of the actor whose objects it was sent."""


class OutOfMemoryError(WorkerLost):
    """An actor's process was ended because its machine ran out of memory. Says which processes held how much."""


class Stalled(RuntimeError):
    """A wait reached its deadline."""


async def answer(call: ray.ObjectRef[Any], *, of: str, act: str, seconds: float) -> Any:  # noqa: ANN401  # an actor's result
    """The result of one call. Raises WorkerLost, of which OutOfMemoryError is one, Stalled, or what the call itself raised."""
    return (await answers([call], of=of, act=act, seconds=seconds))[0]


async def answers(
    calls: Sequence[ray.ObjectRef[Any]], *, of: str, act: str, seconds: float, names: Sequence[str] = ()
) -> list[Any]:
    """Results of calls that run at the same time; the first failure ends the wait for the others.

    Only a loss that explains the failure is waited for, LOSS_SECONDS at most: the peers of a process that is gone see a
    broken connection, and say so before Ray knows of the loss.

    names: of the actors that are called, where `of` is the name of them all.
    """
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.wait_for(asyncio.gather(*running), seconds))
    except TimeoutError as error:
        silent = [name for name, call in zip(names, running, strict=False) if call.cancelled()]
        who = f"{of} ({', '.join(silent)})" if silent else of
        raise Stalled(
            f"{who} did not answer to {act} within {seconds:g} s; its log in the run folder says what it did last"
        ) from error
    except (RayActorError, Killed) as error:
        raise _lost(of, act, error) from error
    except RayTaskError as error:
        if isinstance(error.cause, OwnerDiedError):
            raise WorkerLost(f"{of} failed at {act}: the process that has what it was sent was lost") from error
        if (loss := await _loss(running)) is not None:
            raise _lost(of, act, loss) from error
        raise _cause(error) from error


async def _loss(running: Sequence[asyncio.Future[Any]]) -> RayActorError | Killed | None:
    """The loss of a process behind one of these calls, by now or within LOSS_SECONDS; None when all others answer."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LOSS_SECONDS
    while True:
        for call in running:
            if call.done() and isinstance(error := call.exception(), (RayActorError, Killed)):
                return error
        waiting = [call for call in running if not call.done()]
        left = until - loop.time()
        if not waiting or left <= 0:
            return None
        await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def _lost(of: str, act: str, loss: RayActorError | Killed) -> WorkerLost:
    if isinstance(loss, Killed):
        return OutOfMemoryError(_out_of_memory(of, act, str(loss)))
    return WorkerLost(f"{of} was lost during {act}: {_reason(loss)}")


def _cause(error: RayTaskError) -> Exception:
    """What the call raised. torch's CheckpointException, which is no Exception, by the last line of its trace."""
    if isinstance(error.cause, Exception):
        return error.cause
    return RuntimeError(str(error).strip().splitlines()[-1].strip())


def _reason(error: RayActorError) -> str:
    return " ".join(str(error).split())[:400]


def _out_of_memory(of: str, act: str, said: str) -> str:
    """In our words what Ray says of its kill: numbers of the machine, and its largest processes."""
    used = re.search(r"Memory usage (\d+)B .* of (\d+)B limit", said)
    machine = f" ({int(used[1]) / 1e9:.1f} of {int(used[2]) / 1e9:.1f} GB used)" if used else ""
    users = re.findall(r"^\d+\t([\d.]+)\t(.+)$", said, re.MULTILINE)[:_LARGEST]
    held = ", ".join(f"{command.strip()[:60]} {size} GB" for size, command in users)
    return (
        f"{of} was ended during {act}, because its machine ran out of memory{machine}{f': {held}' if held else ''}. "
        "Lower train.batch.microBatchPerDevice, rollout.maxSequences or data.maxResponseTokens, train adapters "
        "(train.lora), or use more memory"
    )
