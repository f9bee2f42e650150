"""The history of a training: which attempt is open, and which number comes next.

The history consists of `status.attempts` and the RayJobs that exist: a RayJob that was created just before the operator
ended is an attempt although no status lists it yet.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from qwen35_operator.api.v1alpha1 import Attempt, AttemptOutcome
from qwen35_operator.kube.object_records import Pod, RayCluster, RayJob
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.status.text_limits import cut
from qwen35_operator.status.times import rfc3339, seconds_since
from qwen35_trainer.contract import ProgressReport

RESET_SECONDS = 3600
"""Minimum time for which an attempt with progress must have been active so that earlier restarts no longer count."""
CHANGES_WINDOW_SECONDS = 3600
"""How long an attempt that its user has stopped, by a change of the spec or by spec.suspend, delays the next attempts."""
MAX_ATTEMPTS = 64
"""Maximum number of attempts that the status keeps; the oldest are dropped."""
FULL_MESSAGES = 10
"""Number of the newest attempts that keep their messages in full."""
MAX_MESSAGE_BYTES = 4096
MAX_FAULT_BYTES = 1024
MAX_OLD_MESSAGE_BYTES = 256
"""Maximum length of each message of an attempt that is not among the FULL_MESSAGES newest ones.

All messages of MAX_ATTEMPTS attempts then have at most 80 KB, so the status fits into a request in any language.
"""


def with_adopted(observed: Observed) -> Observed:
    """Return the observation with an open attempt added for each RayJob that is newer than all recorded attempts.

    Such a RayJob exists if the operator was killed after it created the RayJob and before it wrote the status.
    """
    newest = max((attempt.number for attempt in observed.status.attempts), default=0)
    missing = [job for job in observed.jobs if job.attempt > newest]
    if not missing:
        return observed
    adopted = [
        Attempt(number=job.attempt, job=job.name, outcome="Running", startTime=rfc3339(job.created))
        for job in sorted(missing, key=lambda job: job.attempt)
    ]
    attempts = (*observed.status.attempts, *adopted)[-MAX_ATTEMPTS:]
    return replace(observed, status=observed.status.model_copy(update={"attempts": attempts}))


def last_attempt(status_attempts: Sequence[Attempt]) -> Attempt | None:
    return status_attempts[-1] if status_attempts else None


def open_attempt(observed: Observed) -> Attempt | None:
    """Return the attempt that has not ended, or None if all attempts have ended."""
    attempt = last_attempt(observed.status.attempts)
    return attempt if attempt is not None and attempt.outcome == "Running" else None


def next_number(observed: Observed) -> int:
    """Return the number of the next attempt: one more than the maximum over recorded attempts and existing RayJobs."""
    numbers = [job.attempt for job in observed.jobs] + [attempt.number for attempt in observed.status.attempts]
    return 1 + max(numbers, default=0)


def report_of(observed: Observed, attempt: Attempt) -> ProgressReport | None:
    """Return the trainer's latest report, or None if the report is absent, unreadable or of another attempt."""
    progress = None if observed.report is None else observed.report.progress
    return progress if progress is not None and progress.attempt == attempt.number else None


def report_problem(observed: Observed) -> str | None:
    """Return why `-progress` cannot be used; None if it has a report of an attempt that exists, or is empty.

    It cannot be used if it cannot be parsed, or if its report is of an attempt that has never existed.
    """
    if observed.report is None:
        return None
    newest, progress = next_number(observed) - 1, observed.report.progress
    if progress is not None and progress.attempt > newest:
        return f"progress.json: attempt: {progress.attempt} does not exist; the latest attempt is {newest}"
    return observed.report.problem


def present_report_of(observed: Observed, attempt: Attempt) -> ProgressReport | None:
    """Return the trainer's latest report if it is from the attempt's present RayCluster; otherwise None.

    An attempt gets another RayCluster each time its queue admits it again. If the attempt has no RayJob, its RayCluster
    is not checked. The result is also None if the report is absent, unreadable or of another attempt.

    A trainer of an earlier release does not name its RayCluster in the report. Such a report counts as one from an
    earlier RayCluster if it was written before the present RayCluster was created, or if KubeRay has not created the
    present RayCluster yet.
    """
    report, job = report_of(observed, attempt), job_of(observed, attempt.number)
    if report is None or job is None:
        return report
    if report.cluster is not None:
        return report if report.cluster == job.cluster else None
    cluster = cluster_of(observed, attempt.number)
    written = None if observed.report is None else observed.report.written
    if cluster is None:
        return None if job.deployment in ("", "Initializing") else report
    return None if written is not None and written < cluster.created else report


def job_of(observed: Observed, number: int) -> RayJob | None:
    """Return the RayJob of the attempt with this number; None if there is none."""
    return next((job for job in observed.jobs if job.attempt == number), None)


def cluster_of(observed: Observed, number: int) -> RayCluster | None:
    """Return the RayCluster of the attempt with this number; None if there is none.

    This is the cluster that the RayJob names. If there is no RayJob, or if it names none, it is any cluster of the attempt.
    """
    job = job_of(observed, number)
    name = "" if job is None else job.cluster
    clusters = (cluster for cluster in observed.clusters if cluster.attempt == number)
    return next((cluster for cluster in clusters if name in ("", cluster.name)), None)


def present_pods_of(observed: Observed, number: int) -> tuple[Pod, ...]:
    """Return the pods of the present RayCluster of the attempt with this number, also those that are being deleted.

    The present RayCluster is the one that the attempt's RayJob names, whether KubeRay has created it yet or not. Pods of another
    one belong to a RayCluster that an eviction has ended, or to a copy that somebody has made. If there is no RayJob, or if it
    names no RayCluster, these are all pods of the attempt.
    """
    job = job_of(observed, number)
    cluster = "" if job is None else job.cluster
    return tuple(pod for pod in observed.pods if pod.attempt == number and cluster in ("", pod.cluster))


def pods_of(observed: Observed, number: int) -> tuple[Pod, ...]:
    """Return the pods of the present RayCluster of the attempt with this number, except those that are being deleted."""
    return tuple(pod for pod in present_pods_of(observed, number) if pod.deleting is None)


def replaced(attempts: Sequence[Attempt], attempt: Attempt) -> tuple[Attempt, ...]:
    """Return the history of attempts in which `attempt` replaces the recorded attempt with the same number."""
    return tuple(attempt if recorded.number == attempt.number else recorded for recorded in attempts)


def bounded(attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Return the attempts with messages of bounded length. Only the FULL_MESSAGES newest ones keep full messages."""
    older, newest = attempts[:-FULL_MESSAGES], attempts[-FULL_MESSAGES:]
    return (
        *(_with_messages(attempt, MAX_OLD_MESSAGE_BYTES, MAX_OLD_MESSAGE_BYTES) for attempt in older),
        *(_with_messages(attempt, MAX_MESSAGE_BYTES, MAX_FAULT_BYTES) for attempt in newest),
    )


def _with_messages(attempt: Attempt, message_bytes: int, fault_bytes: int) -> Attempt:
    """Return the attempt, with its message cut to `message_bytes` and the message of its fault to `fault_bytes`."""
    message, fault = attempt.message, attempt.fault
    if message is not None:
        message = cut(message, message_bytes)
    if fault is not None:
        fault = fault.model_copy(update={"message": cut(fault.message, fault_bytes)})
    return attempt.model_copy(update={"message": message, "fault": fault})


def with_clock(observed: Observed, now: datetime) -> Observed:
    """Start the clock of the open attempt, or stop it if a queue holds the attempt back. Returns the new observation.

    The clock measures for how long an attempt has been active. spec.activeDeadlineSeconds limits the sum of these times
    over all attempts. Each time the clock stops, the attempt's number of evictions grows by one.
    """
    attempt = open_attempt(observed)
    job = None if attempt is None else job_of(observed, attempt.number)
    if attempt is None or job is None or job.held == (attempt.activeSince is None):
        return observed
    if job.held:
        changes: dict[str, Any] = {"activeSeconds": active_seconds(attempt, now), "activeSince": None}
        changes["evictions"] = attempt.evictions + 1
    else:
        # Without a queue the clock has run since the start, also that of an attempt of a release without clocks.
        changes = {"activeSince": rfc3339(now) if job.queued or attempt.startTime is None else attempt.startTime}
    attempts = replaced(observed.status.attempts, attempt.model_copy(update=changes))
    return replace(observed, status=observed.status.model_copy(update={"attempts": attempts}))


def ended(
    observed: Observed,
    attempt: Attempt,
    now: datetime,
    *,
    outcome: AttemptOutcome,
    reason: str,
    message: str,
    counted: bool = False,
) -> dict[str, Any]:
    """Return the changes of the status that record the end of an attempt: new values by field name.

    reason: one word for programs. message: for people. counted: whether the attempt uses up one of the restarts
    that failurePolicy.maxRestarts allows.
    """
    status, report = observed.status, report_of(observed, attempt)
    restarts = counted_restarts(observed, attempt, now) if outcome == "Failed" else status.restarts
    closed = attempt.model_copy(
        update={
            "update": None if report is None else report.update,
            "activeSeconds": active_seconds(attempt, now),
            "activeSince": None,
            "outcome": outcome,
            "counted": counted,
            "reason": cut(reason, 128),
            "message": message,
            "endTime": rfc3339(now),
            "stop": None,
        }
    )
    return {
        "attempts": replaced(status.attempts, closed),
        "restarts": restarts + counted,
        "activeSeconds": status.activeSeconds + active_seconds(attempt, now),
    }


def failures_in_a_row(status_attempts: Sequence[Attempt], retried: int) -> list[Attempt]:
    """Return the attempts that have failed in a row up to now, the newest first.

    The list goes back at most to the last attempt that got further than all attempts before it. This attempt is
    included. retried: number of the last attempt before a user requested another try of the training. Attempts up to
    this number are left out.
    """
    failed: list[Attempt] = []
    for index in reversed(range(len(status_attempts))):
        attempt = status_attempts[index]
        if attempt.outcome != "Failed" or attempt.number <= retried:
            break
        failed.append(attempt)
        if _furthest(attempt) > max(map(_furthest, status_attempts[:index]), default=0):
            break
    return failed


def stopped_by_changes(status_attempts: Sequence[Attempt], now: datetime) -> int:
    """Return how many attempts their user has stopped in the last CHANGES_WINDOW_SECONDS.

    Such an attempt ended because the spec changed, or because of spec.suspend.
    """
    return sum(
        attempt.outcome == "Suspended"
        and attempt.endTime is not None
        and seconds_since(attempt.endTime, now) < CHANGES_WINDOW_SECONDS
        for attempt in status_attempts
    )


def counted_restarts(observed: Observed, attempt: Attempt, now: datetime) -> int:
    """Return how many earlier restarts count towards failurePolicy.maxRestarts when this attempt ends.

    The result is 0 if the attempt was active for at least RESET_SECONDS and got further than all attempts before it, so
    that rare faults do not add up over the weeks of a training.
    """
    report = report_of(observed, attempt)
    earlier = [_furthest(other) for other in observed.status.attempts if other.number < attempt.number]
    progress = report is not None and report.update > max(earlier, default=0)
    return 0 if progress and active_seconds(attempt, now) >= RESET_SECONDS else observed.status.restarts


def _furthest(attempt: Attempt) -> int:
    return attempt.update or 0


def active_seconds(attempt: Attempt, now: datetime) -> int:
    """Return the whole seconds for which the attempt has been active, without time in which a queue held it back."""
    since = attempt.activeSince
    return attempt.activeSeconds + (0 if since is None else max(0, round(seconds_since(since, now))))
