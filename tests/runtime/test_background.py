"""Waiting for work that a stop request may cancel."""

import asyncio

import pytest

from qwen35_trainer.runtime.background import done_before


async def test_work_that_is_done_first_counts():
    assert await done_before(asyncio.Event(), asyncio.ensure_future(asyncio.sleep(0)))


async def test_a_stop_cancels_the_work():
    stop, work = asyncio.Event(), asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(stop.set)
    assert not await done_before(stop, work)
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_what_the_work_raises_is_raised():
    async def fails() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        await done_before(asyncio.Event(), asyncio.ensure_future(fails()))
