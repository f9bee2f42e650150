"""Waiting for something to have happened, without missing it."""

from __future__ import annotations

import asyncio


class Changes:
    """Counts what happened. Read `count`, look at the state, then wait for more than that count: nothing that happens
    in between is missed, and any number of tasks may wait.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def announce(self) -> None:
        """Something happened."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def beyond(self, count: int) -> None:
        """Return once more than `count` things have happened."""
        while self.count <= count:
            await self._next.wait()
