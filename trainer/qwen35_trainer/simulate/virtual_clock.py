"""Virtual time: a queue of function calls, each at a moment."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class VirtualClock:
    """Calls functions in order of time. Calls for the same moment happen in the order in which they were scheduled."""

    __slots__ = ("_calls", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._serial = count()

    def at(self, time: float, function: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401, passed to function
        """Call `function(argument)` at `time`."""
        heapq.heappush(self._calls, (time, next(self._serial), function, argument))

    def after(self, seconds: float, function: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401, as above
        """Call `function(argument)` in `seconds` seconds."""
        heapq.heappush(self._calls, (self.now + seconds, next(self._serial), function, argument))

    def step(self) -> bool:
        """Advance to the next scheduled call and make it. Returns False if there is none."""
        if not self._calls:
            return False
        self.now, _, function, argument = heapq.heappop(self._calls)
        function(argument)
        return True
