"""Limits how long a coroutine that computes keeps the event loop of a scoring process."""

import asyncio
import time
from typing import Final

TURN_SECONDS: Final = 0.005


class Turn:
    """The time of one coroutine since it last let others run."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def let_others_run(self) -> None:
        """Let the event loop read replies of other processes, if the coroutine has computed for TURN_SECONDS."""
        if time.perf_counter() - self._began >= TURN_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
