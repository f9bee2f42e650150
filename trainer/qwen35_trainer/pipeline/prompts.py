"""Which prompt is dispatched next: places in the epoch order, each once, those that came back first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PromptFeed:
    """Places `start`, `start` + 1, … without end, after `pending`, which an earlier run dispatched and did not train."""

    def __init__(self, start: int = 0, pending: Iterable[int] = ()) -> None:
        self._next = start
        self._returned = deque(pending)

    @property
    def position(self) -> int:
        """The first place that was never handed out."""
        return self._next

    @property
    def returned(self) -> tuple[int, ...]:
        """Places that come before any new one."""
        return tuple(self._returned)

    def take(self) -> int:
        """The next place."""
        if self._returned:
            return self._returned.popleft()
        self._next += 1
        return self._next - 1

    def give_back(self, position: int) -> None:
        """A group left untrained and not for good: its prompt comes next."""
        self._returned.append(position)
