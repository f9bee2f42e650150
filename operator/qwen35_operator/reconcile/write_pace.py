"""Limits how often anything is written for one training.

Somebody with the rights of one trainer, or of one namespace, can change a report or an object of the training in a loop, and the
operator answers many of these changes with a write immediately: a changed phase, an object that was deleted. The limit is a token
bucket: BURST reconciles in a row may write, then one every PERIOD_SECONDS. So no write waits longer than that, and a training that
nobody disturbs rarely reaches the limit.
"""

from datetime import datetime, timedelta
from typing import Final

from qwen35_operator.kube.store import TrainingKey

BURST: Final = 40
PERIOD_SECONDS: Final = 2.5


class WritePace:
    """The token buckets of all trainings. A full bucket takes no memory."""

    def __init__(self) -> None:
        """Begin with full buckets."""
        self._full: dict[TrainingKey, datetime] = {}  # when the bucket will be full

    def wait(self, key: TrainingKey, now: datetime) -> float:
        """Return the seconds until a reconcile of the training may write; 0 if now."""
        return max(0.0, self._missing(key, now) - (BURST - 1) * PERIOD_SECONDS)

    def wrote(self, key: TrainingKey, now: datetime) -> None:
        """Count a reconcile of the training that writes."""
        missing = min(self._missing(key, now) + PERIOD_SECONDS, BURST * PERIOD_SECONDS)
        self._full = {other: full for other, full in self._full.items() if now < full}
        self._full[key] = now + timedelta(seconds=missing)

    def _missing(self, key: TrainingKey, now: datetime) -> float:
        """Return the seconds until the bucket is full; at most those of an empty bucket, also if the clock was set back."""
        return min(max(0.0, (self._full.get(key, now) - now).total_seconds()), BURST * PERIOD_SECONDS)
