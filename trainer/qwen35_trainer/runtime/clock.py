"""Seconds since a training first started, across attempts."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """started: wall-clock second at which this attempt began. earlier: seconds of the attempts before it."""

    started: float
    earlier: float = 0.0

    def now(self) -> float:
        return self.at(time.time())

    def at(self, wall: float) -> float:
        """Training time of a wall-clock second."""
        return wall - self.started + self.earlier

    def wall(self, at: float) -> float:
        """Wall-clock second of a training time."""
        return at + self.started - self.earlier
