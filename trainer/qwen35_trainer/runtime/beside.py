"""Work in a thread that the end of the process does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def beside[T](name: str, work: Callable[[], T]) -> Future[T]:
    """Start `work`; its result or error is the future's. Executors would not do: Python waits for their threads at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # the future's caller gets it, SystemExit too
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
