"""What is left of attempts that are over, and of trainings that are."""

from datetime import datetime
from typing import Literal

from qwen35_operator.api.v1alpha1 import Attempt
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.actions import Action, Announce, Delete
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.verdict import Verdict
from qwen35_operator.settings import Settings
from qwen35_operator.status.conditions import holds, since
from qwen35_operator.status.times import seconds_since

type Final = Literal["Succeeded", "Failed"]

SETTLE = 60.0
"""Seconds that a RayJob has to end by itself once its attempt is over: KubeRay then keeps its record."""


def decide(seen: Observed, settings: Settings, now: datetime) -> Verdict | None:
    """A training that is over stays so; its children go once ttlSecondsAfterFinished are over."""
    finals: tuple[Final, ...] = ("Succeeded", "Failed")
    over = next((kind for kind in finals if holds(seen.status, kind)), None)
    if over is None:
        return None
    condition = next(one for one in seen.status.conditions if one.type == over)
    ttl = None if seen.training is None else seen.training.spec.ttlSecondsAfterFinished
    if ttl is None:
        return Verdict(over, condition.reason, condition.message)
    left = ttl - seconds_since(since(seen.status, over) or "", now)
    if left > 0:
        return Verdict(over, condition.reason, condition.message, after=left)
    doomed = [Delete("RayJob", job.name, job.uid) for job in seen.jobs if job.deleting is None]
    doomed += [Delete(child.kind, child.name, child.uid) for child in seen.children.values() if child.deleting is None]
    events = (Announce("Normal", "Cleaned", f"ttlSecondsAfterFinished {ttl} are over"),) if doomed else ()
    return Verdict(over, condition.reason, condition.message, (*events, *doomed))


def leftovers(seen: Observed, now: datetime) -> tuple[tuple[Action, ...], float | None]:
    """Deletions of RayJobs whose attempts are over, and when to look again."""
    closed = {attempt.number: attempt for attempt in seen.status.attempts if attempt.outcome != "Running"}
    waits = [
        (job, _wait(closed[job.attempt], over=job.deployment in attempts.OVER, now=now))
        for job in seen.jobs
        if job.attempt in closed and job.deleting is None
    ]
    doomed = tuple(Delete("RayJob", job.name, job.uid) for job, wait in waits if wait is not None and wait <= 0)
    return doomed, min((wait for _, wait in waits if wait is not None and wait > 0), default=None)


def _wait(attempt: Attempt, *, over: bool, now: datetime) -> float | None:
    """Seconds until the RayJob goes; None when it may stay, as the record of its attempt."""
    if attempt.outcome == "Suspended":
        return 0.0
    if over:
        return None
    return SETTLE - seconds_since(attempt.endTime or attempt.startTime or "", now)
