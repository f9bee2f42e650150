"""Detects an attempt that runs without progress: no new version for failurePolicy.stallFactor × the median time between
versions, and for at least MIN_STALL_SECONDS.

Both times come from the trainer. The API server's time of writing the report corrects the trainer's clock.
"""

from dataclasses import dataclass
from datetime import timedelta

from qwen35_operator.reconcile.observed import ReadReport
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.status.times import at

MIN_STALL_SECONDS = 60.0
"""A tiny model publishes several versions a second, and a busy node may pause it for longer than their median."""
MAX_SKEW_SECONDS = 30.0
"""Larger differences between the trainer's clock and the API server's are reported. Delivering a report takes time too."""


@dataclass(frozen=True)
class Pace:
    """The seconds since the latest weight version, and the limit above which the attempt counts as stalled."""

    age: float
    limit: float

    @property
    def stalled(self) -> bool:
        return self.age > self.limit


def pace(situation: AttemptSituation) -> Pace | None:
    """Return how long ago the attempt's latest weight version was, with the limit for it; None while that cannot be judged.

    That is until three versions and the current head's first report exist, and while a queue holds the job. After an eviction
    the attempt continues in a new cluster: reports from the old cluster do not count, and its pods may exist for a while.
    """
    report, job, cluster = situation.report, situation.job, situation.cluster
    if report is None or report.versionTime is None or report.versionSeconds is None:
        return None
    if job is None or job.held or cluster is None or cluster.deleting is not None:
        return None
    written, number = situation.report_written, situation.attempt.number
    heads = [pod.created for pod in situation.observed.pods if (pod.attempt, pod.pool) == (number, "head")]
    if not heads or (written is not None and written <= max(cluster.created, *heads)):
        return None
    limit = max(MIN_STALL_SECONDS, situation.spec.failurePolicy.stallFactor * report.versionSeconds)
    shift = timedelta(seconds=skew(situation.observed.report) or 0.0)
    return Pace((situation.now - at(report.versionTime) - shift).total_seconds(), limit)


def skew(report: ReadReport | None) -> float | None:
    """Return the seconds by which the API server's clock is ahead of the trainer's, according to the latest report."""
    if report is None or report.progress is None or report.written is None:
        return None
    return (report.written - at(report.progress.time)).total_seconds()
