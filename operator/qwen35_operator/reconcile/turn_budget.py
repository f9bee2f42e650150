"""Limits how long decisions take in one turn of the event loop, in which nothing else runs: neither a probe nor the renewal of the Lease.

    turn 1: decide 2 ms, decide 1 ms, … 20 ms are used ─► turn 2: decide 500 ms (a large spec) ─► turn 3: decide 1 ms …

Usual decisions take a millisecond, and many fit into a turn. After one that takes longer than SECONDS, the next one waits for the next
turn. One decision per turn would be too few: when the processors are busy, turns are long, and a new leader of 5,000 trainings would
decide less often than reports arrive.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SECONDS: Final = 0.02
"""Time that decisions may take in one turn, before the one that exceeds it."""


class TurnBudget:
    """The time that decisions have used in the present turn of the event loop."""

    def __init__(self) -> None:
        """Create an unused budget."""
        self._used = 0.0

    async def available(self) -> None:
        """Wait for a turn in which the budget is not used up. The decision must follow without another await."""
        while self._used >= SECONDS:  # noqa: ASYNC110  # `_begin_turn` ends the wait one turn later, without a task to wake
            await asyncio.sleep(0)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Context manager: the time of the enclosed code, which must not await anything, counts in this turn."""
        if self._used == 0.0:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._used += max(time.perf_counter() - began, 1e-9)

    def _begin_turn(self) -> None:
        self._used = 0.0
