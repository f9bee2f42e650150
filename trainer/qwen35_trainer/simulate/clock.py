"""Virtual time: what happens next, and when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Things to come. Those of the same moment happen in the order in which they were asked for."""

    __slots__ = ("_heap", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._serial = count()

    def at(self, time: float, function: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401, it goes to function
        """Call `function(argument)` at `time`."""
        heapq.heappush(self._heap, (time, next(self._serial), function, argument))

    def after(self, seconds: float, function: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401, as above
        """The same, so many seconds from now."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._serial), function, argument))

    def step(self) -> bool:
        """Let the next thing happen. False: there is none."""
        if not self._heap:
            return False
        self.now, _, function, argument = heapq.heappop(self._heap)
        function(argument)
        return True
