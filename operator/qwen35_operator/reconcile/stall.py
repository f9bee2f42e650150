"""Detects an attempt that hangs: it runs without progress, or its head pod is gone.

There is no heartbeat, because a process that hangs may still send one. An attempt is stalled if no new weight version
has appeared for longer than failurePolicy.stallFactor × the median time between versions, and for longer than
MIN_STALL_SECONDS. The trainer reports the time of the latest version, and the median. The difference between the clocks
of the trainer and the API server is measured (`skew`) and corrected.

Time in which no report could arrive does not count: the age begins at the earliest when this process leads and its cache is
complete, because a leader that cannot reach the API server stops leading. Before an attempt is ended, its report is read
from the API server (`observe`), in case that the watch is late.
"""

from dataclasses import dataclass
from datetime import datetime

from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.observed import ReadReport
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.status.times import at
from qwen35_trainer.manifest import TrainingSpec

MIN_STALL_SECONDS = 60.0
"""Minimum time without a new version after which an attempt counts as stalled.

Tiny models publish several versions per second. Without this minimum, a short pause on a busy node would be a stall.
"""
MAX_SKEW_SECONDS = 30.0
"""Difference between the clocks of trainer and API server above which the training is Degraded.

The measured difference includes the time that a report takes to arrive.
"""


NO_HEAD_SECONDS = 120.0
"""Time without a head pod after which a trainer that has reported counts as lost. KubeRay mostly creates another one within seconds."""


@dataclass(frozen=True)
class Pace:
    """Seconds since the latest weight version, or since reports can be seen again if that is later (`age`), and the `limit` above which the attempt counts as stalled."""

    age: float
    limit: float

    @property
    def stalled(self) -> bool:
        return self.age > self.limit


def pace(situation: AttemptSituation) -> Pace | None:
    """Return the seconds since the attempt's latest weight version, and the limit above which the attempt is stalled.

    Returns None while fewer than three versions exist, because the report then has no median of the seconds between
    versions. Also returns None while the attempt has no RayCluster, while the current head pod has not reported, and
    while a queue holds the job back. After an eviction by its queue, the attempt continues in a new RayCluster. Reports
    from the old RayCluster then no longer count, even while its pods exist.
    """
    report, job, cluster = situation.report, situation.job, situation.cluster
    if report is None or job is None or job.held or cluster is None or cluster.deleting is not None:
        return None
    written, number = situation.report_written, situation.attempt.number
    pods = attempts.present_pods_of(situation.observed, number)
    heads = [pod.created for pod in pods if pod.pool == "head"]
    if not heads or (written is not None and written <= max(cluster.created, *heads)):
        return None
    return measure(situation.spec, situation.observed.report, situation.observed.reports_since, situation.now)


def seconds_until_head_lost(situation: AttemptSituation) -> float | None:
    """Return after how many seconds a trainer whose head pod is gone counts as lost, 0 or less if it does; None if there is a head pod.

    Also returns None before the trainer has reported: KubeRay then has not submitted it, and creates the pod as it creates all others.
    The time begins with the last report, because a trainer without a head cannot report, and at the earliest when reports could be seen.
    """
    report, number = situation.report, situation.attempt.number
    if report is None or any(pod.pool == "head" for pod in attempts.present_pods_of(situation.observed, number)):
        return None
    times = (situation.report_written or at(report.time), situation.observed.reports_since)
    since = max(time for time in times if time is not None)
    return NO_HEAD_SECONDS - (situation.now - since).total_seconds()


def measure(
    spec: TrainingSpec, report: ReadReport | None, reports_since: datetime | None, now: datetime
) -> Pace | None:
    """Return the seconds since the latest weight version of a report, and the limit; None if the report has no median.

    reports_since: when reports could be seen again; the age does not begin earlier.
    """
    progress = None if report is None else report.progress
    if progress is None or progress.versionTime is None or progress.versionSeconds is None:
        return None
    limit = max(MIN_STALL_SECONDS, spec.failurePolicy.stallFactor * progress.versionSeconds)
    age = (now - at(progress.versionTime)).total_seconds() - (skew(report) or 0.0)
    return Pace(age if reports_since is None else min(age, (now - reports_since).total_seconds()), limit)


def skew(report: ReadReport | None) -> float | None:
    """Return the seconds by which the API server's clock is ahead of the trainer's, according to the latest report.

    The result is negative if the API server's clock is behind, and None if there is no readable report with a time.
    """
    if report is None or report.progress is None or report.written is None:
        return None
    return (report.written - at(report.progress.time)).total_seconds()
