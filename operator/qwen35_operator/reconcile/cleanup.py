"""Deletes RayJobs that must not outlive their attempt, and the children of trainings that have ended.

The children are deleted cleanupSecondsAfterFinished seconds after the end of their training. If this field is not set,
the children stay.
"""

from datetime import datetime
from typing import Literal

from qwen35_operator.api.v1alpha1 import Attempt
from qwen35_operator.desired import object_names
from qwen35_operator.kube.kinds import DISRUPTION_BUDGET
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.writes import ClusterWrite, Delete, PostEvent
from qwen35_operator.status.conditions import true_condition
from qwen35_operator.status.times import seconds_since

type FinalCondition = Literal["Succeeded", "Failed"]

JOB_SHUTDOWN_SECONDS = 60.0
"""Time that a RayJob has to end after its attempt has succeeded or failed. A RayJob that ends in this time is kept as a
record of the attempt. Any other is deleted."""
MAX_ENDED_JOBS = 3
"""Maximum number of RayJobs that are kept as records, the newest ones."""


def decide(observed: Observed, now: datetime) -> Verdict | None:
    """Return a verdict that keeps the state of a training that has ended, and deletes its children when it is time.

    The children are deleted cleanupSecondsAfterFinished seconds (their time to live) after the end. If this field is
    not set, the children stay. If the annotation RETRY of a failed training has changed, the verdict starts another
    attempt instead. Returns None if the training has not ended.
    """
    finals: tuple[FinalCondition, ...] = ("Succeeded", "Failed")
    conditions = ((kind, true_condition(observed.status, kind)) for kind in finals)
    final, ending = next(((kind, held) for kind, held in conditions if held is not None), (None, None))
    if final is None or ending is None:
        return None
    if final == "Failed" and observed.retry not in ("", observed.status.retry):
        return _retried(observed)
    ttl = None if observed.training is None else observed.training.spec.cleanupSecondsAfterFinished
    if ttl is None:
        return Verdict(final, ending.reason, ending.message)
    remaining = ttl - seconds_since(ending.lastTransitionTime, now)
    if remaining > 0:
        return Verdict(final, ending.reason, ending.message, after=remaining)
    deletions = [Delete("RayJob", job.name, job.uid) for job in observed.jobs if job.deleting is None]
    deletions += [
        Delete(child.kind, child.name, child.uid)
        for child in observed.children.values()
        if child.deleting is None and child.kind != DISRUPTION_BUDGET.name  # `disruptions.removal` deletes it before
    ]
    events = (PostEvent("Normal", "Cleaned", f"cleanupSecondsAfterFinished {ttl} are over"),) if deletions else ()
    return Verdict(final, ending.reason, ending.message, (*events, *deletions))


def _retried(observed: Observed) -> Verdict:
    """Return the verdict that tries a failed training again: the next attempt starts, and no earlier restart counts."""
    last = attempts.last_attempt(observed.status.attempts)
    changes = {"restarts": 0, "retriedAttempt": 0 if last is None else last.number}
    message = f"annotation {object_names.RETRY} has the new value {observed.retry}: the training is tried again"
    return Verdict("Restarting", "Retried", message, (PostEvent("Normal", "Retried", message),), changes, after=0.0)


def ended_jobs(observed: Observed, now: datetime) -> tuple[tuple[ClusterWrite, ...], float | None]:
    """Return the due deletions of RayJobs whose attempts have ended, and the seconds until the next deletion is due.

    The seconds are None if no further deletion will be due. A RayJob is kept as a record of its attempt if it ends
    within JOB_SHUTDOWN_SECONDS after the attempt. Only the MAX_ENDED_JOBS newest records are kept. The RayJob of a
    suspended attempt is always deleted, because a suspended training must have no pods.
    """
    closed = {attempt.number: attempt for attempt in observed.status.attempts if attempt.outcome != "Running"}
    waits = [
        (job, _wait(closed[job.attempt], job_ended=job.ended, now=now))
        for job in observed.jobs
        if job.attempt in closed and job.deleting is None
    ]
    records = sorted((job for job, wait in waits if wait is None), key=lambda job: job.attempt)
    due = [job for job, wait in waits if wait is not None and wait <= 0] + records[:-MAX_ENDED_JOBS]
    deletions = tuple(Delete("RayJob", job.name, job.uid) for job in due)
    return deletions, min((wait for _, wait in waits if wait is not None and wait > 0), default=None)


def _wait(attempt: Attempt, *, job_ended: bool, now: datetime) -> float | None:
    """Return the seconds until the RayJob of an ended attempt is deleted; None if it is kept as a record.

    job_ended: whether the RayJob itself has ended.
    """
    if attempt.outcome == "Suspended":
        return 0.0
    if job_ended:
        return None
    return JOB_SHUTDOWN_SECONDS - seconds_since(attempt.endTime or attempt.startTime or "", now)
