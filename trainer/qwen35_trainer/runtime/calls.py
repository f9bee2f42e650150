"""Calls to actors: each has a deadline, and a failure says which actor failed at what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import OwnerDiedError, RayActorError, RayTaskError


class WorkerLost(RuntimeError):
    """An actor's process ended, or that of the actor whose objects it was sent."""


class Stalled(RuntimeError):
    """A wait reached its deadline."""


async def answer(call: ray.ObjectRef[Any], *, of: str, act: str, seconds: float) -> Any:  # noqa: ANN401  # an actor's result
    """The result of one call. Raises WorkerLost, Stalled, or what the call itself raised."""
    return (await answers([call], of=of, act=act, seconds=seconds))[0]


async def answers(calls: Sequence[ray.ObjectRef[Any]], *, of: str, act: str, seconds: float) -> list[Any]:
    """Results of calls that run at the same time; the first failure cancels the wait for the others."""
    try:
        return list(await asyncio.wait_for(asyncio.gather(*calls), seconds))
    except TimeoutError as error:
        raise Stalled(
            f"{of} did not answer to {act} within {seconds:g} s; its log in the run folder says what it did last"
        ) from error
    except RayActorError as error:
        raise WorkerLost(f"{of} was lost during {act}: {_reason(error)}") from error
    except RayTaskError as error:
        if isinstance(error.cause, OwnerDiedError):
            raise WorkerLost(f"{of} failed at {act}: the process that has what it was sent was lost") from error
        raise _cause(error) from error


def _cause(error: RayTaskError) -> Exception:
    """What the call raised. torch's CheckpointException, which is no Exception, by the last line of its trace."""
    if isinstance(error.cause, Exception):
        return error.cause
    return RuntimeError(str(error).strip().splitlines()[-1].strip())


def _reason(error: RayActorError) -> str:
    return " ".join(str(error).split())[:400]
