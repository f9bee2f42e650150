"""Runs work in a thread, and waits for work until the work is done or the run has to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any


def run_in_thread[T](name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread called `name`. Returns a future with the result or the exception of `work`.

    A daemon thread does not delay the exit of Python. A thread of an executor would.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised by the future, SystemExit too
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


async def done_before(stop: asyncio.Event, work: asyncio.Future[Any]) -> bool:
    """Wait until `work` is done or `stop` is set. Returns whether the work is done.

    If `stop` is set, the work is cancelled, and the result is False even if the work has just finished. If the work
    raises an exception, it is raised here.
    """
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop.is_set():
        work.cancel()
        return False
    await work
    return True
