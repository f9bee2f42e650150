"""Which prompt is dispatched next: positions of the epoch order, each exactly once, given-back ones first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PromptFeed:
    """Positions `start` … `end` - 1, after those that an earlier run dispatched and did not train."""

    def __init__(self, end: int, start: int = 0, pending: Iterable[int] = ()) -> None:
        self._end, self._next = end, start
        self._returned = deque(pending)

    @property
    def position(self) -> int:
        """The first position that was never handed out."""
        return self._next

    @property
    def returned(self) -> tuple[int, ...]:
        """Positions that come before any new one."""
        return tuple(self._returned)

    def take(self) -> int | None:
        """The next position, or None when none is left."""
        if self._returned:
            return self._returned.popleft()
        if self._next >= self._end:
            return None
        self._next += 1
        return self._next - 1

    def give_back(self, position: int) -> None:
        """A group left untrained: its prompt comes next."""
        self._returned.append(position)
