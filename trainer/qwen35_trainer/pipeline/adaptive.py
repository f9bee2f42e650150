"""Adaptive dispatch: limits the groups in flight (dispatched, not finished) so that few of them miss their deadlines.

    every batch ─► how many groups in flight will still run at their deadline?
                     more than TOLERATED_BATCH_SHARE of a batch ─► fewer in flight (× DECREASE_FACTOR)
                     slots are idle                             ─► more in flight (+ INCREASE_BATCH_SHARE of a batch)

The limit increases additively and decreases multiplicatively, as in congestion control (AIMD). The batch at which a
group finishes is predicted from the lengths of finished groups of the same data source, and from the mean number of
tokens that a sequence gains per batch. The prediction does not use the prompt's reference answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qwen35_trainer.pipeline.window import Window

TOLERATED_BATCH_SHARE = 0.1
DECREASE_FACTOR, INCREASE_BATCH_SHARE = 0.9, 0.25
BINS_PER_DOUBLING = 4
"""Histogram bins per doubling of the length: a bin is 19 % wide."""
DECAY_PER_BATCH = 0.98
"""Factor by which the weight of every observed length shrinks per batch, because lengths change while a model learns.

A length has half of its weight after 35 batches.
"""


@dataclass
class LengthHistogram:
    """A histogram of response lengths in logarithmic bins, in which older lengths weigh less.

    counts: index of a bin → sum of the weights of the lengths in the bin. A length has weight 1 when it is added, and
    `decay` lowers all weights.
    """

    counts: dict[int, float] = field(default_factory=dict)

    def add(self, tokens: int) -> None:
        index = self._bin(tokens)
        self.counts[index] = self.counts.get(index, 0.0) + 1.0

    def decay(self, factor: float) -> None:
        """Multiply all weights by `factor`, and drop the bins whose weight is then at most 0.001."""
        self.counts = {index: count * factor for index, count in self.counts.items() if count * factor > 1e-3}

    def weight_above(self, tokens: float) -> float:
        """Return the sum of the weights in all bins above the bin that contains `tokens`."""
        limit = self._bin(tokens)
        return sum(count for index, count in self.counts.items() if index > limit)

    @staticmethod
    def _bin(tokens: float) -> int:
        return math.floor(math.log2(max(tokens, 1.0)) * BINS_PER_DOUBLING)


class AdaptiveDispatch:
    """Adapts the maximum number of groups in flight to the expected number of groups that miss their deadline.

    `limit` is the maximum number of groups in flight (dispatched, not finished). It starts at the window's limit, and
    stays between 1 and the window's limit.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._limit = float(window.limit)
        self._lengths: dict[str, LengthHistogram] = {}  # by source
        self._in_flight: dict[int, tuple[str, int]] = {}  # group → (source, batch at dispatch)
        self._in_flight_counts: dict[tuple[str, int], int] = {}  # (source, batch at dispatch) → groups
        # Sums over finished groups, with decay: tokens of the longest sequence, and batches from dispatch to finish.
        self._tokens = self._batches = 0.0

    @property
    def limit(self) -> int:
        return max(1, math.floor(self._limit))

    def dispatched(self, group: int, source: str, batch: int) -> None:
        """Count a dispatched group as in flight.

        source: data source of the group's prompt. batch: number of the next batch to train.
        """
        key = self._in_flight[group] = (source, batch)
        self._in_flight_counts[key] = self._in_flight_counts.get(key, 0) + 1

    def finished(self, group: int, longest: int, batch: int) -> None:
        """Stop counting a finished group as in flight, and add `longest` to the histogram of the group's data source.

        longest: number of tokens of the group's longest response. batch: number of the next batch to train. Raises
        KeyError if the group is not in flight.
        """
        source, dispatched_at = self._in_flight[group]
        self.left(group)
        self._lengths.setdefault(source, LengthHistogram()).add(longest)
        self._tokens += longest
        # Batches are whole numbers and dispatch falls anywhere between two: add half a batch, the average.
        self._batches += batch - dispatched_at + 0.5

    def left(self, group: int) -> None:
        """Stop counting a group as in flight. A group that is not counted is ignored."""
        key = self._in_flight.pop(group, None)
        if key is not None:
            self._in_flight_counts[key] -= 1
            if not self._in_flight_counts[key]:
                del self._in_flight_counts[key]

    def trained(self, batch: int, *, idle: bool) -> None:
        """Adjust the limit after a batch has trained.

        Decreases the limit if the groups that are expected to miss their deadline are more than TOLERATED_BATCH_SHARE
        of a batch. Otherwise increases the limit if a slot is idle. Older lengths weigh less afterwards. batch: number
        of the next batch to train. idle: whether a slot (room for one sequence) is free on some replica.
        """
        if self.expected_late(batch) > TOLERATED_BATCH_SHARE * self._window.groups_per_batch:
            self._limit = max(1.0, min(self._limit, sum(self._in_flight_counts.values())) * DECREASE_FACTOR)
        elif idle:
            increase = INCREASE_BATCH_SHARE * self._window.groups_per_batch
            self._limit = min(self._limit + increase, float(self._window.limit))
        for lengths in self._lengths.values():
            lengths.decay(DECAY_PER_BATCH)
        self._tokens, self._batches = self._tokens * DECAY_PER_BATCH, self._batches * DECAY_PER_BATCH

    def expected_late(self, batch: int) -> float:
        """Return how many of the groups in flight are expected to run beyond their deadline.

        batch: number of the next batch to train. Groups do not count until a group of their data source has finished.
        """
        if self._batches == 0.0:
            return 0.0
        tokens_per_batch = self._tokens / self._batches
        late = 0.0
        for (source, dispatched_at), count in self._in_flight_counts.items():
            lengths = self._lengths.get(source)
            if lengths is None:
                continue
            deadline = self._window.deadline(self._window.version_of(dispatched_at))
            running = lengths.weight_above(tokens_per_batch * (batch - dispatched_at))
            if running > 0.0:
                batches_allowed = max(deadline, batch) - dispatched_at + 1
                late += count * lengths.weight_above(tokens_per_batch * batches_allowed) / running
        return late
