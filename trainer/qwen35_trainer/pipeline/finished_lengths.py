"""The lengths of the latest finished responses, and how many tokens a longer response is expected to gain."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

MAX_LENGTHS = 1000
"""Number of the latest finished responses whose lengths are kept."""
REFRESH_SHARE = 0.02
"""Share of the kept lengths that must be new before estimates use them. Sorting for every response would cost too much."""


class FinishedLengths:
    """Estimates the remaining length of a response that has `tokens` tokens already.

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
        """Return the expected number of tokens that a response with `tokens` tokens still gains.

        This is the mean over all kept responses that became longer, and over one that is assumed to reach the limit.
        Without the latter, a response that is longer than all finished ones would have no estimate. At the start of a
        run, when only short responses have finished, the estimate would be far too low.
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
