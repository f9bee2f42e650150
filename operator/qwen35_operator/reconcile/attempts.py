"""The history of a training: which attempt is open, which comes next.

The durable truth is `status.attempts` together with the RayJobs that exist: a RayJob that was created just before the
operator ended is an attempt although no status names it yet.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from qwen35_operator.api.v1alpha1 import Attempt, Outcome
from qwen35_operator.reconcile.observed import Observed, Pod, RayCluster, RayJob
from qwen35_operator.status.times import rfc3339, seconds_since
from qwen35_trainer.contract import Progress

OVER = ("Complete", "Failed", "ValidationFailed")
"""Deployment states in which a RayJob stays."""
LONGEST = 64
"""Attempts that the status keeps."""


def with_adopted(seen: Observed) -> Observed:
    """The same, with an attempt in the history for each RayJob that exists."""
    known = {attempt.number for attempt in seen.status.attempts}
    newest = max(known, default=0)
    missing = [job for job in seen.jobs if job.attempt > newest]
    if not missing:
        return seen
    adopted = [
        Attempt(number=job.attempt, job=job.name, outcome="Running", startTime=rfc3339(job.created))
        for job in sorted(missing, key=lambda job: job.attempt)
    ]
    attempts = (*seen.status.attempts, *adopted)[-LONGEST:]
    return replace(seen, status=seen.status.model_copy(update={"attempts": attempts}))


def last(seen: Observed) -> Attempt | None:
    return seen.status.attempts[-1] if seen.status.attempts else None


def opened(seen: Observed) -> Attempt | None:
    """The attempt that is under way."""
    attempt = last(seen)
    return attempt if attempt is not None and attempt.outcome == "Running" else None


def next_number(seen: Observed) -> int:
    """Beyond every attempt that ever left a trace."""
    numbers = [job.attempt for job in seen.jobs] + [attempt.number for attempt in seen.status.attempts]
    return 1 + max(numbers, default=0)


def report_of(seen: Observed, attempt: Attempt) -> Progress | None:
    """What the attempt has reported; a report of an earlier attempt does not count."""
    progress = None if seen.reported is None else seen.reported.progress
    return progress if progress is not None and progress.attempt == attempt.number else None


def job_of(seen: Observed, number: int) -> RayJob | None:
    return next((job for job in seen.jobs if job.attempt == number), None)


def cluster_of(seen: Observed, number: int) -> RayCluster | None:
    """The attempt's cluster: of several, the one that its RayJob names."""
    job = job_of(seen, number)
    clusters = [cluster for cluster in seen.clusters if cluster.attempt == number]
    named = [cluster for cluster in clusters if job is not None and cluster.name == job.cluster]
    return next(iter(named or clusters), None)


def pods_of(seen: Observed, number: int) -> tuple[Pod, ...]:
    """The attempt's pods that are not on their way out."""
    return tuple(pod for pod in seen.pods if pod.attempt == number and pod.deleting is None)


def replaced(attempts: Sequence[Attempt], attempt: Attempt) -> tuple[Attempt, ...]:
    """The history with the attempt in the place of the one of its number."""
    return tuple(attempt if one.number == attempt.number else one for one in attempts)


def ended(
    seen: Observed,
    attempt: Attempt,
    now: datetime,
    *,
    outcome: Outcome,
    reason: str,
    message: str,
    counted: bool = False,
) -> dict[str, Any]:
    """Status changes that record the attempt's end."""
    closed = attempt.model_copy(
        update={
            "outcome": outcome,
            "counted": counted,
            "reason": reason[:128],
            "message": message[:4096],
            "endTime": rfc3339(now),
        }
    )
    return {
        "attempts": replaced(seen.status.attempts, closed),
        "restarts": seen.status.restarts + counted,
        "activeSeconds": seen.status.activeSeconds + duration(attempt, now),
    }


def duration(attempt: Attempt, now: datetime) -> int:
    """Whole seconds that the attempt has taken so far."""
    return 0 if attempt.startTime is None else max(0, round(seconds_since(attempt.startTime, now)))
