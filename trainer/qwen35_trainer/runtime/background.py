"""Runs work in a thread, and waits for work until it is done, its time is over, or the run has to stop.

Work on files runs in daemon threads: storage that does not answer, such as a hard NFS mount without its server, holds a
thread for ever, and a daemon thread lets the process end nevertheless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from threading import Thread
from typing import Any


def run_in_thread[T](name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread called `name`. Returns a future with the result or the exception of `work`.

    A daemon thread does not delay the exit of Python. A thread of an executor would. The thread has a copy of the
    caller's context variables, as with `asyncio.to_thread`.
    """
    context = copy_context()
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that nobody who stops waiting can cancel it

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001  # raised by the future, SystemExit too
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


class Unfinished(Exception):
    """Work in a thread was not done in time. The thread continues."""


async def done_within[T](seconds: float | None, work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, and return its result, or raise its exception.

    seconds: maximum duration; None: no limit. Raises Unfinished after that time.
    """
    running = asyncio.get_running_loop().run_in_executor(_DAEMON_THREADS, work)
    try:
        await asyncio.wait({running}, timeout=seconds)
        if not running.done():
            raise Unfinished
        return running.result()
    finally:
        running.cancel()  # nobody reads a later result


class _DaemonThreads(Executor):
    """Runs each piece of work in a daemon thread of its own."""

    def submit[**P, T](self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return run_in_thread("files", lambda: work(*args, **kwargs))


_DAEMON_THREADS = _DaemonThreads()


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
