"""The time of a training across its attempts, and how busy a pool was."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainingClock:
    """Converts wall-clock time to training time, which counts from the first start and leaves out the time between attempts.

    started: wall-clock second at which this attempt began. earlier: duration of the previous attempts, in seconds.
    """

    started: float
    earlier: float = 0.0

    def now(self) -> float:
        return self.at(time.time())

    def at(self, wall: float) -> float:
        """Convert a wall-clock second to training time."""
        return wall - self.started + self.earlier

    def wall(self, at: float) -> float:
        """Convert a training time to a wall-clock second."""
        return at + self.started - self.earlier


@dataclass
class PoolMeter:
    """Measures the idle share and the tokens per second of a pool of `workers` workers.

    Both measurements cover the time since the previous `read`. The caller adds the pool's tokens to `tokens`. Times are
    wall-clock seconds.
    """

    workers: int
    tokens: int = 0
    _busy: float = 0.0
    _since: float = field(default_factory=time.time)

    def add(self, start: float, end: float) -> None:
        """Record that a worker was busy from `start` to `end`."""
        self._busy += max(0.0, end - max(start, self._since))

    def read(self) -> tuple[float, float]:
        """Return the idle share of the pool, 0 to 1, and the tokens per second since the previous call."""
        now = time.time()
        seconds = max(now - self._since, 1e-6)
        idle = min(1.0, max(0.0, 1.0 - self._busy / (seconds * self.workers)))
        rate = self.tokens / seconds
        self._since, self._busy, self.tokens = now, 0.0, 0
        return idle, rate
