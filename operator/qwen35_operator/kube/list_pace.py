"""The pace at which a process lists objects: with pauses while another process leads.

    another process leads:  one page of one list ─► pause of PAUSES × its time ─► the next page, of any list
    otherwise:              page ─► page ─► …, of all lists at the same time

A process that starts lists everything: 40,000 objects with 5,000 trainings. If it starts after a fail-over, the API server
has its lists and the new leader's requests to serve at the same time. The leader is in a hurry then, and the other process is not.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

PAUSES = 2.0
"""Time of a pause over the time of the page before it."""
MAX_PAUSE_SECONDS = 5.0
"""Maximum time of a pause. A standby may become the leader at any time, and then has no reason to wait."""
MAX_PAUSES_SECONDS = 180.0
"""Maximum time of all pauses of a process together. The API server refuses to continue a list after 5 minutes."""


class ListPace:
    """The pace of all lists of one process."""

    def __init__(self, is_standby: Callable[[], bool] = lambda: False) -> None:
        """Create a pace. is_standby: returns whether another process leads; may be called by any thread."""
        self._is_standby = is_standby
        self._left = MAX_PAUSES_SECONDS
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def page(self) -> AsyncIterator[None]:
        """Context manager: request and parse one page. Use it in one event loop only."""
        if not self._pauses():
            yield
            return
        async with self._one:
            time = asyncio.get_running_loop().time
            began = time()
            yield
            await self.pause(time() - began)

    async def pause(self, seconds: float) -> None:
        """Pause after a page if another process leads. seconds: the time that the page took. May be called in any event loop."""
        if self._pauses():
            pause = min(PAUSES * seconds, MAX_PAUSE_SECONDS)
            self._left -= pause
            await asyncio.sleep(pause)

    def _pauses(self) -> bool:
        return self._left > 0 and self._is_standby()
