"""Work that a run's stop may end before it is done."""

from __future__ import annotations

import asyncio
from typing import Any


async def done_before(stop: asyncio.Event, work: asyncio.Future[Any]) -> bool:
    """Wait until `work` is done, and raise what it raised. False when `stop` is set before: then the work is cancelled."""
    told = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if stop.is_set():
        work.cancel()
        return False
    await work
    return True
