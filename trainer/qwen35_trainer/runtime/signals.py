"""The signals of `qwen35 run`. The process that receives them does nothing else, so that it can always end the run in time.

    terminal, kill, kubelet ──► parent ── one byte for each ──► child ─┬─ main thread: raises Interrupted
                                   ▲                                   └─ thread "run": Ray, data, driver
                                   ├──────────── BEGUN ────────────────┘
                                   └── exit code, orphans

phase      it begins with              signal   what happens                                   exit code
starting   `main` of cli.py            first    the run ends within END_SECONDS or is killed   130, nothing was written
                                       second   it is killed                                   130, nothing was written
begun      BEGUN, sent before the      first    it finishes the update and saves: no limit     0; 130 before the first update
           first file is written       second   it ends within END_SECONDS or is killed        130, as of the last checkpoint
                                       third    it is killed                                   130, as of the last checkpoint

A signal that follows one of its own kind within REPEAT_SECONDS is taken for the same one: `timeout` sends its SIGTERM to the
process, and then to the group.

The child leads a process group of its own. Ctrl-C, and `timeout`, signal the parent's group: Ray's processes, which would not
survive SIGTERM, are needed until the run has saved. A signal that the child gets itself is ignored: a sender that
signals every process, as Ray does when it stops a job, has sent it to the parent too.

Ray takes SIGTERM over if it is started in a process's main thread, and then raises SystemExit there, whatever runs. The child starts it
in another thread, which lives until Ray has ended: Linux ends Ray's processes with the thread that started them.

Until Python comes to `main`, a signal has Python's effect: SIGTERM ends the process, SIGINT prints a traceback.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from qwen35_trainer.exits import FAILED, INTERRUPTED
from qwen35_trainer.runtime.interrupted import Interrupted

if TYPE_CHECKING:
    from concurrent.futures import Future

END_SECONDS = 7.0
"""How long a run that was told to end may take to tell the operator, before it is killed. With a margin within 10 s."""
REAP_SECONDS = 2.0
"""Longest wait for killed processes to be gone. One that waits for a hanging disk cannot be killed."""
REPEAT_SECONDS = 0.25
"""Two signals of one kind within this time count as one. Two presses of Ctrl-C are further apart."""

TOO_EARLY = "ended by a signal before the training began; nothing was written"
SECOND = "ended by a second signal; nothing since the last checkpoint was kept"

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEGUN = b"begun"
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_SHOW_CURSOR = "\x1b[?25h"


def limit(signals: int, *, begun: bool) -> float | None:
    """Seconds that a run has left after so many signals; None: as long as it takes."""
    fatal = signals - begun
    return None if fatal < 1 else END_SECONDS if fatal == 1 else 0.0


class Signals:
    """The run's view of its signals. Without a parent, as in a test, there are none."""

    def __init__(self, parent: socket.socket | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._taken = 0
        self._begun = False

    @property
    def count(self) -> int:
        """Signals so far."""
        with self._lock:
            return self._taken + self._waiting()

    def begin(self) -> None:
        """From here on the run writes files. Raises Interrupted when there was a signal before."""
        if self._parent is None:
            return
        with self._lock:
            if self._taken + self._waiting():
                raise Interrupted(TOO_EARLY)
            self._begun = True
            self._parent.send(BEGUN)

    def attend[T](self, work: Callable[[], T], needs: Future[Any] | None = None) -> T:
        """The result of `work`, which runs in a thread. Raises what it raises, or Interrupted as soon as it has a limit.

        needs: what `work` waits for at some time; if it fails, that is raised immediately. After this and after Interrupted the
        thread still runs: the process is about to end without waiting for it.
        """
        if self._parent is None:
            return work()
        from qwen35_trainer.runtime.beside import beside

        over, end = socket.socketpair()
        with over, end:
            running = beside("run", work)
            running.add_done_callback(lambda _: _send(end, b"over"))
            if needs is not None:
                needs.add_done_callback(lambda done: _send(end, b"failed") if done.exception() else None)
            news = select.poll()  # not select.select, which takes no file number above 1023
            news.register(self._parent, select.POLLIN)
            news.register(over, select.POLLIN)
            while True:
                news.poll()
                succeeded = running.done() and running.exception() is None
                self._take()
                if not succeeded and limit(self._taken, begun=self._begun) is not None:
                    raise Interrupted(SECOND if self._begun else TOO_EARLY)
                if running.done():
                    return running.result()
                if needs is not None and needs.done():
                    needs.result()

    def _waiting(self) -> int:
        """Bytes that the main thread has not taken. They stay: it would not wake up for bytes that are gone."""
        return 0 if self._parent is None else len(_received(self._parent, socket.MSG_PEEK) or b"")

    def _take(self) -> None:
        assert self._parent is not None
        with self._lock:
            received = _received(self._parent)
            self._taken += len(received or b"")
        if received == b"":
            self._lose_parent()

    def _lose_parent(self) -> None:
        """The parent was killed: nobody waits for this run, and Ray ends with it."""
        os._exit(FAILED)


def attended(work: Callable[[Signals], object]) -> int:
    """Call `work` in a child process, and receive the signals for it. Returns its exit code once no process of it is left."""
    caught = _catch()
    _adopt_orphans()
    parents_end, childs_end = socket.socketpair()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})  # the child counts none of its own
    child = os.fork()
    if child == 0:
        parents_end.close()
        _end_with(parent)
        _be_child(work, childs_end, caught, mask)
    childs_end.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return _Parent(child, parents_end, caught[0]).wait()


class _Parent:
    def __init__(self, child: int, run: socket.socket, caught: int) -> None:
        self._child, self._run, self._caught = child, run, caught
        self._sources: list[socket.socket | int] = [run, caught]
        self._signals = 0
        self._counted: dict[int, float] = {}
        """When a signal of each kind was last counted."""
        self._begun = False
        self._killed = False
        self._deadline: float | None = None

    def wait(self) -> int:
        while (code := self._ended()) is None:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                if self._killed:  # it waits for a hanging disk
                    return self._exit_code(-signal.SIGKILL)
                os.kill(self._child, signal.SIGKILL)
                self._killed, left = True, REAP_SECONDS
                self._deadline = time.monotonic() + left
            select.select(self._sources, [], [], left)
            self._receive()
        self._receive()  # BEGUN may still be unread if the run ended right after it
        _end_orphans()
        return self._exit_code(code)

    def _ended(self) -> int | None:
        pid, status = os.waitpid(self._child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _receive(self) -> None:
        received = _received(self._run)
        if received == b"" and self._run in self._sources:
            self._sources.remove(self._run)  # it is ending: SIGCHLD follows
        begins = bool(received) and not self._begun
        signals = sum(self._counts(number) for number in _caught(self._caught))
        if not (begins or signals):
            return
        self._begun |= begins
        self._signals += signals
        _send(self._run, bytes(signals))
        if self._killed:
            return
        seconds = limit(self._signals, begun=self._begun)
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def _counts(self, number: int) -> bool:
        """Whether the signal is another one, not the same one once more."""
        now = time.monotonic()
        repeated = now - self._counted.get(number, -REPEAT_SECONDS) < REPEAT_SECONDS
        if not repeated:
            self._counted[number] = now
        return not repeated

    def _exit_code(self, code: int) -> int:
        if code < 0 and sys.stdout.isatty():
            sys.stdout.write(_SHOW_CURSOR)  # the live view had hidden it
        ended = limit(self._signals, begun=self._begun) is not None
        # FAILED: sent to every process, the signal can have ended Ray first, which ends the child without a word.
        if ended and (code < 0 or (code == FAILED and not self._begun)):
            sys.stderr.write(f"{SECOND if self._begun else TOO_EARLY}\n")
            return INTERRUPTED
        if code < 0:
            sys.stderr.write(f"the run was ended by {signal.Signals(-code).name}\n")
            return FAILED
        return code


def _catch() -> tuple[int, int]:
    """From here on, signals do nothing but write their numbers to a pipe: its two ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGCHLD):
        signal.signal(number, _ignore)
    # Ray starts the command of a job with SIGINT blocked, where it would wait for ever.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})
    return read, write


def _ignore(*_: object) -> None:
    """Not SIG_IGN, which the child's processes would inherit."""


def _caught(pipe: int) -> list[int]:
    """Signals in the pipe, without those that tell of an ended process."""
    try:
        return [number for number in os.read(pipe, 4096) if number in SIGNALS]
    except BlockingIOError:
        return []


def _be_child(
    work: Callable[[Signals], object], parent: socket.socket, caught: tuple[int, int], mask: Iterable[int]
) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for end in caught:
        os.close(end)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    signal.signal(
        signal.SIGTTOU, signal.SIG_IGN
    )  # for a terminal it is in the background, where `stty tostop` lets nobody print
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = _worked(work, Signals(parent))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            stream.flush()
    # Not sys.exit, which waits for threads, and for Ray once more. All files are closed by now, and the parent ends what is left.
    os._exit(code)


def _worked(work: Callable[[Signals], object], signals: Signals) -> int:
    """The exit code with which Python would end after `work`."""
    try:
        work(signals)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else 0
    except BaseException:  # noqa: BLE001  # the last resort, as in Python itself
        sys.excepthook(*sys.exc_info())
        return FAILED
    return 0


def _adopt_orphans() -> None:
    """Become the parent of every process that outlives its own below us."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _end_with(parent: int) -> None:
    """Let the kernel end this process when its parent is killed. `attend` would notice only while it waits."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before
        os._exit(FAILED)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def _end_orphans() -> None:
    """Kill what the run left behind: Ray's processes, when it had no time to end them. Returns when none is left."""
    deadline = time.monotonic() + REAP_SECONDS
    while time.monotonic() < deadline:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(0.01)


def _children() -> list[int]:
    """Ours, zombies included: until we wait for them, their numbers are nobody else's."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:  # noqa: PTH123  # pathlib takes long to import
            return [int(child) for child in children.read().split()]
    except FileNotFoundError:  # a kernel without it
        return []


def _received(connection: socket.socket, flags: int = 0) -> bytes | None:
    """What is there; None if nothing is. Empty when the other end is closed."""
    try:
        return connection.recv(4096, flags | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # whom it would tell is gone
        connection.send(message)
