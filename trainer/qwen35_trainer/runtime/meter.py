"""Idle shares and rates between two updates."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class PoolMeter:
    """Counts how long the workers of a pool were busy. Times are wall-clock seconds."""

    workers: int
    tokens: int = 0
    _busy: float = 0.0
    _since: float = field(default_factory=time.time)

    def add(self, start: float, end: float) -> None:
        """A worker was busy from `start` to `end`."""
        self._busy += max(0.0, end - max(start, self._since))

    def read(self) -> tuple[float, float]:
        """Idle share of the pool, 0 to 1, and tokens per second, since the last reading; starts anew."""
        now = time.time()
        seconds = max(now - self._since, 1e-6)
        idle = min(1.0, max(0.0, 1.0 - self._busy / (seconds * self.workers)))
        rate = self.tokens / seconds
        self._since, self._busy, self.tokens = now, 0.0, 0
        return idle, rate
