"""A sequence of any length, thinned to bounded memory, for charts."""

from typing import Final


class Thinned[T]:
    """A sequence that keeps the first, every `stride`-th and the last of the values added.

    The stride doubles when more than `limit` values are kept. A value that is kept at one stride was also kept at all
    smaller strides, so the chart of a running training loses older points, but never moves them.
    """

    def __init__(self, limit: int) -> None:
        self._limit: Final = limit
        self._kept: list[T] = []
        self._last: T | None = None
        self.stride = 1
        self.added = 0
        """Number of values added, including those that are not kept."""

    def add(self, value: T) -> None:
        if self.added % self.stride == 0:
            self._kept.append(value)
        self._last = value
        self.added += 1
        if len(self._kept) > self._limit:
            self._kept = self._kept[::2]
            self.stride *= 2

    @property
    def values(self) -> list[T]:
        """The values that are kept, in order."""
        if self._last is None or (self.added - 1) % self.stride == 0:
            return list(self._kept)
        return [*self._kept, self._last]
