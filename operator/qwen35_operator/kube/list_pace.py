"""The pace at which a process lists objects: with pauses while another process leads.

    holds the Lease:            all lists at the same time
    does not hold it:           one list ─► the next list ─► …
    another process renews it:  one list, with a pause of PAUSES × its time after each page ─► the next list ─► …

A process that starts lists everything: 40,000 objects with 5,000 trainings. If it starts after a fail-over, the API server
has its lists and the new leader's requests to serve at the same time. The leader is in a hurry then, and the other process is not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

PAUSES = 2.0
"""Time of a pause over the time of the page before it."""
MAX_PAUSE_SECONDS = 5.0
"""Maximum time of a pause. A standby may become the leader at any time, and then has no reason to wait."""
TURN_SECONDS = 0.5
"""Time between two checks of a list that waits for its turn, whether there are still turns."""
MAX_PACED_SECONDS = 60.0
"""Time after the start of the process after which all lists are requested at the same time, without pauses. The API server keeps the events
of 75 s, and a watch continues from the start of its list."""


class ListPace:
    """The pace of all lists of one process."""

    def __init__(
        self,
        holds: Callable[[], bool] = lambda: True,
        is_standby: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a pace, by default that of a leader.

        holds, is_standby: see `Election`. clock: returns monotonic seconds. Any thread may call all of them.
        """
        self._holds, self._is_standby, self._clock = holds, is_standby, clock
        self._began = clock()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Context manager: request one list. Use it in one event loop only."""
        if not await self._takes_turns():
            yield
            return
        try:
            yield
        finally:
            self._one.release()

    async def pause(self, seconds: float) -> None:
        """Pause after a page if another process leads. seconds: the time that the page took. May be called in any event loop."""
        if self._is_standby() and self._is_paced():
            await asyncio.sleep(min(PAUSES * seconds, MAX_PAUSE_SECONDS))

    async def _takes_turns(self) -> bool:
        """If lists are paced, wait for the turn, acquire the lock and return True. Otherwise return False.

        A page without an answer may keep the turn for long, so this method checks regularly whether this process still has to wait.
        """
        while self._is_paced():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._one.acquire(), TURN_SECONDS)
                return True
        return False

    def _is_paced(self) -> bool:
        return not self._holds() and self._clock() - self._began < MAX_PACED_SECONDS
