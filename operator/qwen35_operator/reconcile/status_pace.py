"""Limits how often the status of one training is written when nothing else is.

Somebody with the rights of one trainer can change its report in a loop, for example its phase, and a changed phase is written
immediately. The limit is a token bucket: BURST writes in a row, then one every PERIOD_SECONDS. A training that reports
as trainers do never reaches it; one whose pods become ready at the same time may, and its status then follows within seconds.
"""

from datetime import datetime, timedelta
from typing import Final

from qwen35_operator.kube.store import TrainingKey

BURST: Final = 20
PERIOD_SECONDS: Final = 2.5


class StatusPace:
    """The token buckets of all trainings. A full bucket takes no memory."""

    def __init__(self) -> None:
        """Begin with full buckets."""
        self._full: dict[TrainingKey, datetime] = {}  # when the bucket will be full

    def wait(self, key: TrainingKey, now: datetime) -> float:
        """Return the seconds until the training's status may be written; 0 if now."""
        missing = (self._full.get(key, now) - now).total_seconds()
        if missing > BURST * PERIOD_SECONDS:
            return 0.0  # the clock was set back
        return max(0.0, missing - (BURST - 1) * PERIOD_SECONDS)

    def wrote(self, key: TrainingKey, now: datetime) -> None:
        """Count a write of the training's status."""
        latest = now + timedelta(seconds=BURST * PERIOD_SECONDS)
        self._full = {other: full for other, full in self._full.items() if now < full <= latest}
        self._full[key] = self._full.get(key, now) + timedelta(seconds=PERIOD_SECONDS)
