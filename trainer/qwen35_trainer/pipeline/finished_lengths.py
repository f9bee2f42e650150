"""Estimates how many tokens an unfinished response will still gain, from the lengths of finished responses."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

MAX_LENGTHS = 1000
"""Number of the latest finished responses whose lengths are kept."""
REFRESH_SHARE = 0.02
"""New lengths enter the estimates when their number exceeds this share of the lengths in use.

Sorting the lengths after every response would cost too much.
"""


class FinishedLengths:
    """Estimates the remaining length of an unfinished response from the lengths of the latest finished responses.

    limit: maximum number of tokens of a response (data.maxResponseTokens).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._unsorted = 0  # number of lengths that `_sorted` lacks
        self._sorted: list[int] = []
        self._sums: list[int] = [0]  # by number of the longest lengths: their sum

    def add(self, tokens: int) -> None:
        """Add the length of a finished response."""
        self._latest.append(tokens)
        self._unsorted += 1

    def remaining(self, tokens: int) -> float:
        """Return how many more tokens a response that has `tokens` tokens is expected to gain.

        The result is the mean of (length - `tokens`) over the latest finished responses that are longer than `tokens`,
        and over one assumed response of the maximum length. Without the assumed response, a response that is longer than
        all finished ones would have no estimate, and estimates would be far too low at the start of a run, when only
        short responses have finished.
        """
        if self._unsorted > REFRESH_SHARE * len(self._sorted):
            self._sort()
        longer = len(self._sorted) - bisect_right(self._sorted, tokens)
        gained = self._sums[longer] - longer * tokens
        return (gained + max(0, self._limit - tokens)) / (longer + 1)

    def _sort(self) -> None:
        self._sorted = sorted(self._latest)
        self._sums = list(accumulate(reversed(self._sorted), initial=0))
        self._unsorted = 0
