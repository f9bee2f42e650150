"""Whole runs of the real command in the process of the tests, with Ray played by threads.

    start("run", FILE, …) ─► a thread: the command line ─► runtime.run_command ─► Driver ─► RolloutWorker, TrainWorker   (threads.py)
                                 │ stdout, stderr             │ logs/          records, checkpoints, journal, report: real
                                 ▼                            ▼
                              the same `Running` and `Ended` as those of a command in a process of its own

There is one train worker, and one run at a time. When a run has ended the process is as it was before: patches, logging, the
garbage collector, torch's threads and random numbers, the environment, and the modules of reward functions.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

# Imported before any thread needs them: two that import parts of transformers at the same time see half of it.
import qwen35_trainer.engines.fsdp.engine
import qwen35_trainer.models.qwen3_5.build_model
import qwen35_trainer.rollout.torch  # noqa: F401
from qwen35_trainer.commands import app
from qwen35_trainer.runtime import driver, prepare, process, run_command
from qwen35_trainer.runtime.signals import Signals
from tests.patience import PATIENCE

from .conftest import ENVIRONMENT, Ended, Running
from .threads import STEP_SECONDS, Fault, Look, Threads, current_actor


class _Signals(Signals):
    """Leaves this process, which is that of the tests, running when the connection is closed."""

    def _lose_parent(self) -> None:
        """The test that closed the connection continues."""


class _Command(threading.Thread):
    """`qwen35 …` on a thread, with those parts of a process that `Running` uses."""

    pid = 0

    def __init__(self, running: LocalRunning, arguments: list[str]) -> None:
        super().__init__(name="qwen35", daemon=True)
        self._running, self._arguments = running, arguments
        self._code: int | None = None

    def run(self) -> None:
        running = self._running
        with (
            running.out.open("w", 1) as out,
            running.err.open("w", 1) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                with _restored(running):
                    code = app(self._arguments, standalone_mode=False, obj=_Signals(running.run_end)) or 0
            except BaseException:  # noqa: BLE001  # as a process does
                traceback.print_exc()
                code = 1
        self._code = code

    def poll(self) -> int | None:
        return self._code

    def wait(self, seconds: float) -> int:
        self.join(seconds)
        assert self._code is not None, f"the run still runs after {seconds:g} s"
        return self._code


@dataclass
class LocalRunning(Running):
    """A run under way. Its processes are threads, which end with it."""

    threads: Threads = field(default_factory=Threads)
    ends: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    """Of the connection between the process that receives signals and the run: runtime/signals.py."""

    @property
    def run_end(self) -> socket.socket:
        return self.ends[1]

    def signal(self, number: int, *, group: bool = False) -> None:
        """As the process that receives signals passes them on."""
        self.ends[0].send(b"\0")

    def lose(self, name: str) -> None:
        """The newest actor of that name ends, as a process that is killed."""
        [*_, actor] = [actor for actor in self.threads.actors if actor.name == name]
        actor.lose()

    def let_pass(self, seconds: float) -> None:
        """Whenever nothing is under way but calls that wait or hang, some seconds pass, until these have or the run has ended."""
        deadline, remaining = time.monotonic() + PATIENCE, seconds
        while remaining > 0.0 and self.process.poll() is None:
            step = min(remaining, STEP_SECONDS)
            remaining -= step if self.threads.let_pass(step) else 0.0
            assert time.monotonic() < deadline, "something is under way all the time"
            time.sleep(0.005)

    def processes(self, title: str = "") -> list[psutil.Process]:
        return []

    def kill(self) -> None:
        self.threads.shutdown()
        self.process.wait(PATIENCE)


@dataclass
class Local:
    """Starts `qwen35 …` here, in the place of a `Command`."""

    room: Path
    started: list[LocalRunning] = field(default_factory=list)

    def start(
        self, *arguments: object, output: Path, faults: tuple[Fault, ...] = (), look: Look | None = None
    ) -> LocalRunning:
        """`look` is called with each answer that is on its way, on the thread of who answers."""
        self.end()  # runs one at a time: ends a run that a failed test left behind
        running = LocalRunning(home=self.room / str(len(self.started)), folder=output, threads=Threads(faults, look))
        running.home.mkdir()
        running.out.touch()
        running.err.touch()
        running.process = _Command(running, [*map(str, arguments), "--output", str(output)])
        running.process.start()
        self.started.append(running)
        return running

    def run(self, file: Path, *arguments: object, output: Path | None = None) -> Ended:
        """`qwen35 run FILE …` to its end; the output is a folder next to the manifest unless given."""
        return self.start("run", file, *arguments, output=output or file.parent / "out").end()

    def end(self) -> None:
        """End what a test that failed has left."""
        for running in self.started:
            if running.process.poll() is None:
                running.kill()


@contextlib.contextmanager
def _restored(running: LocalRunning) -> Iterator[None]:
    """With Ray played by threads; restores what a run changes in its process."""
    root, environment, path, modules = logging.getLogger(), os.environ.copy(), sys.path.copy(), set(sys.modules)
    level, torch_threads, random = root.level, torch.get_num_threads(), torch.get_rng_state()
    router = _Router()
    with pytest.MonkeyPatch.context() as patch:
        running.threads.patch(patch)
        patch.setattr(prepare, "started_at", time.time)
        patch.setattr(gc, "freeze", lambda: None)  # frozen objects would escape the gc.collect below
        # What a run gives back to the system is a matter of its own processes; here it would look through all of the tests' memory.
        patch.setattr(run_command, "_release_prepared", lambda: None)
        patch.setattr(process, "trim", lambda: None)
        patch.setattr(process, "return_freed_tensors", lambda: None)
        patch.setattr(driver, "reuse_freed_tensors", lambda: None)
        patch.setattr(driver, "collect_seldom", lambda: None)
        patch.setattr(logging, "basicConfig", router.add)
        os.environ.update(ENVIRONMENT)
        root.addHandler(router)
        root.setLevel(logging.INFO)
        try:
            yield
        finally:
            running.threads.shutdown()
            root.removeHandler(router)
            root.setLevel(level)
            router.close()
            for name in set(sys.modules) - modules:
                if not any(Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(p) for p in path):
                    del sys.modules[name]
            sys.path[:] = path
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads(torch_threads)
            torch.set_rng_state(random)
            gc.enable()
            running.threads.actors.clear()
            gc.collect()  # closes the files of their process groups and event loops


class _Router(logging.Handler):
    """Each actor's lines go to the handler that it has set up; those of other threads to the driver's, whose they are."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[object, logging.Handler] = {}

    def add(self, *, handlers: list[logging.Handler], **_: object) -> None:
        """In the place of `logging.basicConfig`, called by an actor."""
        (handler,) = handlers
        handler.handleError = lambda record: None  # an actor's stderr is not the command's
        self._handlers[current_actor()] = handler

    def emit(self, record: logging.LogRecord) -> None:
        handlers = self._handlers
        own = handlers.get(current_actor()) or next(iter(handlers.values()), None)
        if own is not None:
            own.emit(record)

    def close(self) -> None:
        for handler in self._handlers.values():
            with contextlib.suppress(OSError):  # as at the end of a process on a full disk
                handler.close()
        super().close()
