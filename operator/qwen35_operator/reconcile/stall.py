"""An attempt that runs but makes no progress: no new version for failurePolicy.stallFactor × the median time between
versions.

Both times are the trainer's own; the API server's note of when the report was written corrects its clock.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.observed import Observed, Reported
from qwen35_operator.status.times import at
from qwen35_trainer.contract import Progress

LEAST = 60.0
"""Seconds: a tiny model publishes several versions a second, and a busy node may pause it for longer."""
SKEW = 30.0
"""Seconds between the trainer's clock and the API server's that are worth a word: reports take some themselves."""


@dataclass(frozen=True)
class Pace:
    """How long ago the latest version was, and how long it may take, in seconds."""

    age: float
    limit: float

    @property
    def stalled(self) -> bool:
        return self.age > self.limit


def pace(seen: Observed, progress: Progress, now: datetime) -> Pace | None:
    """None while fewer than two versions are known, while a queue holds the job, and until the present head has reported.

    After an eviction the attempt goes on in a new cluster. Reports from the old one do not count, and its pods may stay for a
    while.
    """
    if seen.training is None or progress.versionTime is None or progress.versionSeconds is None:
        return None
    job, cluster = attempts.job_of(seen, progress.attempt), attempts.cluster_of(seen, progress.attempt)
    if job is None or job.held or cluster is None or cluster.deleting is not None:
        return None
    written = None if seen.reported is None else seen.reported.written
    heads = [pod.created for pod in seen.pods if (pod.attempt, pod.pool) == (progress.attempt, "head")]
    if not heads or (written is not None and written <= max(cluster.created, *heads)):
        return None
    limit = max(LEAST, seen.training.spec.failurePolicy.stallFactor * progress.versionSeconds)
    shift = timedelta(seconds=skew(seen.reported) or 0.0)
    return Pace((now - at(progress.versionTime) - shift).total_seconds(), limit)


def skew(reported: Reported | None) -> float | None:
    """Seconds that the API server's clock is ahead of the trainer's, as the latest report shows."""
    if reported is None or reported.progress is None or reported.written is None:
        return None
    return (reported.written - at(reported.progress.time)).total_seconds()
