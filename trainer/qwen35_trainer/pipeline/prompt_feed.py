"""Decides which prompt is dispatched next: returned prompts first, then new ones in the epoch order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PromptFeed:
    """Returns the positions of prompts in order of dispatch. A position counts prompts over all epochs.

    pending: positions that come first, because an earlier attempt dispatched those prompts without training them.
    start: position of the first new prompt. New prompts follow the pending ones: `start`, `start` + 1 and so on.
    """

    def __init__(self, start: int = 0, pending: Iterable[int] = ()) -> None:
        self._next = start
        self._returned = deque(pending)

    @property
    def position(self) -> int:
        """The position of the first new prompt, which neither this attempt nor an earlier one has dispatched."""
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
        """Put back the prompt of a group that left untrained. `take` returns it again before any new prompt."""
        self._returned.append(position)
