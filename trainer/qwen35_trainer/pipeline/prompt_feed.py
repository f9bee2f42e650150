"""The order of dispatch: places in the epoch order, each once, with returned prompts first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PromptFeed:
    """Gives prompts in order, by their position over all epochs.

    First come `pending`, which an earlier run dispatched and did not train, then `start`, `start` + 1, … without end.
    """

    def __init__(self, start: int = 0, pending: Iterable[int] = ()) -> None:
        self._next = start
        self._returned = deque(pending)

    @property
    def position(self) -> int:
        """The position of the first prompt that was never taken."""
        return self._next

    @property
    def returned(self) -> tuple[int, ...]:
        """The positions of prompts to dispatch again, before any new prompt."""
        return tuple(self._returned)

    def take(self) -> int:
        """Return the position of the next prompt, and count it as taken."""
        if self._returned:
            return self._returned.popleft()
        self._next += 1
        return self._next - 1

    def give_back(self, position: int) -> None:
        """Return the prompt of a group that left untrained, so that it is dispatched again before any new one."""
        self._returned.append(position)
