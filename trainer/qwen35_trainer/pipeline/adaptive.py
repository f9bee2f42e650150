"""Adaptive dispatch: hold prompts back while those in flight would miss their deadlines.

    every batch ─► of the groups in flight, how many will still run at their deadline?
                     more than TOLERATED of a batch ─► fewer in flight (× CUT)
                     slots stand idle               ─► more in flight (+ STEP of a batch)

Additive increase, multiplicative decrease, as congestion control does it. A finish is predicted from the lengths of finished
groups of the same data source, and from how many tokens a sequence grows in a batch; never from the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qwen35_trainer.pipeline.window import Window

TOLERATED = 0.1
CUT, STEP = 0.9, 0.25
PER_OCTAVE = 4
"""Bins of the histograms per doubling of the length: a bin is 19 % wide."""
FORGET = 0.98
"""Per batch: lengths drift while a model learns; half of the memory is 35 batches old."""


@dataclass
class Lengths:
    """Lengths seen, as a histogram over logarithmic bins that forgets."""

    counts: dict[int, float] = field(default_factory=dict)

    def add(self, tokens: int) -> None:
        at = self._bin(tokens)
        self.counts[at] = self.counts.get(at, 0.0) + 1.0

    def forget(self, factor: float) -> None:
        self.counts = {at: count * factor for at, count in self.counts.items() if count * factor > 1e-3}

    def beyond(self, tokens: float) -> float:
        """Weight of the lengths in higher bins than this one."""
        at = self._bin(tokens)
        return sum(count for each, count in self.counts.items() if each > at)

    @staticmethod
    def _bin(tokens: float) -> int:
        return math.floor(math.log2(max(tokens, 1.0)) * PER_OCTAVE)


class Adaptive:
    """`limit`: groups that may be in flight. Begins with the whole window, and never leaves 1 … window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._limit = float(window.limit)
        self._lengths: dict[str, Lengths] = {}  # by source
        self._flying: dict[int, tuple[str, int]] = {}  # group → (source, batch at dispatch)
        self._in_flight: dict[tuple[str, int], int] = {}  # the same, counted
        self._tokens = self._batches = 0.0  # of finished groups: longest sequence, and batches from dispatch to finish

    @property
    def limit(self) -> int:
        return max(1, math.floor(self._limit))

    def dispatched(self, group: int, source: str, batch: int) -> None:
        key = self._flying[group] = (source, batch)
        self._in_flight[key] = self._in_flight.get(key, 0) + 1

    def finished(self, group: int, longest: int, batch: int) -> None:
        """`longest`: response tokens of the group's longest sequence; `batch`: the next one."""
        source, began = self._flying[group]
        self.left(group)
        self._lengths.setdefault(source, Lengths()).add(longest)
        self._tokens += longest
        # Batches are whole numbers and dispatch falls anywhere between two: half a batch on average.
        self._batches += batch - began + 0.5

    def left(self, group: int) -> None:
        """The group is in flight no longer."""
        key = self._flying.pop(group, None)
        if key is not None:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]

    def trained(self, batch: int, *, idle: bool) -> None:
        """A batch has trained, and `batch` is the next one; `idle`: some slot is free."""
        if self.late(batch) > TOLERATED * self._window.groups_per_batch:
            self._limit = max(1.0, min(self._limit, sum(self._in_flight.values())) * CUT)
        elif idle:
            self._limit = min(self._limit + STEP * self._window.groups_per_batch, float(self._window.limit))
        for lengths in self._lengths.values():
            lengths.forget(FORGET)
        self._tokens, self._batches = self._tokens * FORGET, self._batches * FORGET

    def late(self, batch: int) -> float:
        """Groups in flight that are expected to run beyond their deadline."""
        if self._batches == 0.0:
            return 0.0
        speed = self._tokens / self._batches
        late = 0.0
        for (source, began), count in self._in_flight.items():
            lengths = self._lengths.get(source)
            if lengths is None:
                continue
            last = self._window.deadline(self._window.version_of(began))
            alive = lengths.beyond(speed * (batch - began))
            if alive > 0.0:
                late += count * lengths.beyond(speed * (max(last, batch) - began + 1)) / alive
        return late
