"""Waiting for work that a stop request may cancel."""

from __future__ import annotations

import asyncio
from typing import Any


async def done_before(stop: asyncio.Event, work: asyncio.Future[Any]) -> bool:
    """Wait for `work` or `stop`. If `stop` is set, cancel the work and return False, even if the work has just finished.

    Otherwise return True, or raise what the work raised.
    """
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop.is_set():
        work.cancel()
        return False
    await work
    return True
