"""Attempts that stop before any of their operations on files, as on a node that stalls or is cut off from the network.

    Attempt("old", work).run_to(7)     performs seven operations of `work`, and stops before the eighth
                .finish()              performs the others

An operation is a call that changes a folder or opens a file for writing, and the moment after each check of an owner. The
operations of threads that the work starts with `asyncio.to_thread` or `background.py` count too.
"""

import io
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

from qwen35_trainer.epoch import Epoch
from tests.patience import PATIENCE

_CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
_attempt: ContextVar["Attempt | None"] = ContextVar("attempt", default=None)


class Attempt:
    """Work on a thread, which performs one operation at a time."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self._work = name, work
        self.operations: list[str] = []
        """What it has performed, and last what it stops before."""
        self.error: BaseException | None = None
        self._may_go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._free = False
        self.over = False
        threading.Thread(target=self._run, name=name, daemon=True).start()
        self._wait()

    def step(self) -> None:
        """Perform one operation, and stop before the next."""
        if not self.over:
            self._may_go.release()
            self._wait()

    def run_to(self, operations: int) -> "Attempt":
        for _ in range(operations):
            self.step()
        return self

    def finish(self) -> "Attempt":
        self._free = True
        self.step()
        return self

    def _wait(self) -> None:
        assert self._stands.acquire(timeout=PATIENCE), f"{self.name} hangs after {self.operations[-3:]}"

    def _run(self) -> None:
        _attempt.set(self)
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.error = error
        self.over = True
        self._stands.release()

    def before(self, operation: str) -> None:
        self.operations.append(operation)
        if not self._free:
            self._stands.release()
            self._may_go.acquire()


def _before(operation: str) -> None:
    if (attempt := _attempt.get()) is not None:
        attempt.before(operation)


def intercept(monkeypatch) -> None:
    """Let every `Attempt` stop before its operations until the test is over."""
    for name in _CHANGES:
        monkeypatch.setattr(os, name, _stopping(name, getattr(os, name)))
    opened, check = io.open, Epoch.check

    def open_file(file, mode="r", *arguments, **named):
        if set(mode) & set("wa+x"):
            _before(f"open {Path(str(file)).name}")
        return opened(file, mode, *arguments, **named)

    def checked(epoch: Epoch) -> None:
        check(epoch)
        _before("after the check")

    monkeypatch.setattr(io, "open", open_file)
    monkeypatch.setattr(Epoch, "check", checked)


def _stopping(name: str, call):
    def stopping(path, *arguments, **named):
        # Not the files in a folder that is deleted as a whole, which has lost its name before.
        if named.get("dir_fd") is None:
            _before(f"{name} {path if isinstance(path, int) else Path(str(path)).name}")
        return call(path, *arguments, **named)

    return stopping
