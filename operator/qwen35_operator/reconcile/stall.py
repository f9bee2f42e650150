"""Detects an attempt that runs without progress.

An attempt is stalled if no new version has appeared for longer than failurePolicy.stallFactor × the median time between
versions, and for longer than MIN_STALL_SECONDS. The trainer reports the time of the latest version and the median. The
time at which the API server wrote the report shows how far the trainer's clock differs, and this is corrected.
"""

from dataclasses import dataclass
from datetime import timedelta

from qwen35_operator.reconcile.observed import ReadReport
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.status.times import at

MIN_STALL_SECONDS = 60.0
"""Minimum time without a new version after which an attempt counts as stalled. Tiny models publish several versions per
second, so that a short pause on a busy node would otherwise count as a stall."""
MAX_SKEW_SECONDS = 30.0
"""Maximum difference between the clocks of trainer and API server that is not reported. A larger difference makes the
training Degraded. The measured difference includes the time that a report takes to arrive."""


@dataclass(frozen=True)
class Pace:
    """Seconds since the latest weight version (`age`), and the `limit` above which the attempt counts as stalled."""

    age: float
    limit: float

    @property
    def stalled(self) -> bool:
        return self.age > self.limit


def pace(situation: AttemptSituation) -> Pace | None:
    """Return the seconds since the attempt's latest weight version, and the limit above which the attempt is stalled.

    The result is None until three versions exist, until the current head pod has reported, and while a queue holds the
    job. After an eviction the attempt continues in a new cluster. Reports from the old cluster do not count any more,
    although the pods of the old cluster may exist for a while.
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
    """Return the seconds by which the API server's clock is ahead of the trainer's, according to the latest report.

    Negative seconds mean that it is behind. None if there is no readable report.
    """
    if report is None or report.progress is None or report.written is None:
        return None
    return (report.written - at(report.progress.time)).total_seconds()
