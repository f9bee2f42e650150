"""The signals of `qwen35 run`. The process that receives them does no other work, so that it can always end the run in time.

    terminal, kill, kubelet ──► parent ── one byte for each ──► child ─┬─ main thread: raises Interrupted
                                   ▲                                   └─ thread "run": Ray, data, driver
                                   ├──────────── BEGUN ────────────────┘
                                   └── exit code, orphans

phase      begins with                 signal   effect                                         exit code
starting   `main` of cli.py            first    the run ends within END_SECONDS or is killed   130, nothing was written
                                       second   it is killed                                   130, nothing was written
begun      BEGUN, sent before the      first    it finishes the update and saves: no limit     0; 130 before the first update
           first file is written       second   it ends within END_SECONDS or is killed        130, as of the last checkpoint
                                       third    it is killed                                   130, as of the last checkpoint

If two signals of one kind arrive within REPEAT_SECONDS, they count as one, because `timeout` sends SIGTERM first to the
process and then to its group.

The child has a separate process group. Ctrl-C and `timeout` signal the parent's group, but Ray's processes, which do
not survive SIGTERM, are needed until the run has saved. The child ignores signals that it receives directly. A sender
that signals every process, as Ray does when it stops a job, also signals the parent.

If Ray is started in the main thread of a process, it handles SIGTERM, and raises SystemExit there at any point. The
child therefore starts Ray in another thread. This thread lives until Ray has ended, because Linux ends Ray's processes
with the thread that started them.

Before Python reaches `main`, signals have Python's default effect: SIGTERM ends the process, SIGINT prints a traceback.
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

from qwen35_trainer.exits import FAILED, INTERRUPTED, Interrupted

if TYPE_CHECKING:
    from concurrent.futures import Future

END_SECONDS = 7.0
"""Maximum time, in seconds, in which a run that ends may report to the operator. After it, the run is killed.

It is shorter than the 10 s that senders of signals usually wait before they kill a process.
"""
REAP_SECONDS = 2.0
"""Maximum wait, in seconds, for killed processes to end.

The wait is limited because a process that waits for a disk may never end.
"""
REPEAT_SECONDS = 0.25
"""Time, in seconds, within which two signals of one kind count as one. Two presses of Ctrl-C are further apart."""

TOO_EARLY = "ended by a signal before the training began; nothing was written"
SECOND_SIGNAL = "ended by a second signal; nothing since the last checkpoint was kept"

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEGUN = b"begun"
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_SHOW_CURSOR = "\x1b[?25h"


def limit(signals: int, *, begun: bool) -> float | None:
    """Return the seconds that a run may still take after `signals` signals have arrived; None: no limit.

    begun: whether the run has begun to write files.
    """
    fatal = signals - begun
    return None if fatal < 1 else END_SECONDS if fatal == 1 else 0.0


class Signals:
    """The signals that the parent process has passed on.

    Without a parent process, as in tests, there are no signals.
    """

    def __init__(self, parent: socket.socket | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._taken = 0
        self._begun = False

    @property
    def count(self) -> int:
        """The number of signals so far."""
        with self._lock:
            return self._taken + self._waiting()

    def begin(self) -> None:
        """Record that the run writes files from now on. Raises Interrupted if there was a signal before."""
        if self._parent is None:
            return
        with self._lock:
            if self._taken + self._waiting():
                raise Interrupted(TOO_EARLY)
            self._begun = True
            self._parent.send(BEGUN)

    def attend[T](self, work: Callable[[], T], needs: Future[Any] | None = None) -> T:
        """Run `work` in a thread, and return its result. Raises the error of `work`.

        needs: a future for which `work` waits; an error of the future is raised immediately. Raises Interrupted at a
        signal that leaves no time to save: the first signal if `begin` has not been called yet, otherwise the second
        one. After Interrupted, or an error of `needs`, the thread still runs. The caller then ends the process without
        waiting for the thread.
        """
        if self._parent is None:
            return work()
        from qwen35_trainer.runtime.background import run_in_thread

        over, end = socket.socketpair()
        with over, end:
            running = run_in_thread("run", work)
            running.add_done_callback(lambda _: _send(end, b"over"))
            if needs is not None:
                needs.add_done_callback(lambda done: _send(end, b"failed") if done.exception() else None)
            poll = select.poll()  # not select.select, which refuses file numbers above 1023
            poll.register(self._parent, select.POLLIN)
            poll.register(over, select.POLLIN)
            while True:
                poll.poll()
                succeeded = running.done() and running.exception() is None
                self._take()
                if not succeeded and limit(self._taken, begun=self._begun) is not None:
                    raise Interrupted(SECOND_SIGNAL if self._begun else TOO_EARLY)
                if running.done():
                    return running.result()
                if needs is not None and needs.done():
                    needs.result()

    def _waiting(self) -> int:
        """Return the number of signals (bytes in the socket) that the main thread has not read.

        The bytes stay in the socket, so that they wake up the main thread.
        """
        return 0 if self._parent is None else len(_received(self._parent, socket.MSG_PEEK) or b"")

    def _take(self) -> None:
        assert self._parent is not None
        with self._lock:
            received = _received(self._parent)
            self._taken += len(received or b"")
        if received == b"":
            self._lose_parent()

    def _lose_parent(self) -> None:
        """End this process, because the parent process was killed. Ray's processes end together with this process."""
        os._exit(FAILED)


def attended(work: Callable[[Signals], object]) -> int:
    """Call `work` in a child process, while this process receives signals and passes them on to the child.

    Returns the exit code of the child after all processes of the child have ended.
    """
    caught = _catch()
    _adopt_orphans()
    parents_end, childs_end = socket.socketpair()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})  # the child ignores signals of its own
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
        """Signal → time at which a signal of this kind was last counted, in seconds of `time.monotonic`."""
        self._begun = False
        self._killed = False
        self._deadline: float | None = None

    def wait(self) -> int:
        while (code := self._ended()) is None:
            remaining = None if self._deadline is None else self._deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                if self._killed:  # the child waits for a hanging disk
                    return self._exit_code(-signal.SIGKILL)
                os.kill(self._child, signal.SIGKILL)
                self._killed, remaining = True, REAP_SECONDS
                self._deadline = time.monotonic() + remaining
            select.select(self._sources, [], [], remaining)
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
            self._sources.remove(self._run)  # the child is ending, and SIGCHLD follows
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
        """Return whether the signal `number` counts. A repetition within REPEAT_SECONDS does not count."""
        now = time.monotonic()
        repeated = now - self._counted.get(number, -REPEAT_SECONDS) < REPEAT_SECONDS
        if not repeated:
            self._counted[number] = now
        return not repeated

    def _exit_code(self, code: int) -> int:
        if code < 0 and sys.stdout.isatty():
            sys.stdout.write(_SHOW_CURSOR)  # the live view hides it
        ended = limit(self._signals, begun=self._begun) is not None
        # FAILED: a signal to every process may end Ray first, and then the child ends without reporting the signal.
        if ended and (code < 0 or (code == FAILED and not self._begun)):
            sys.stderr.write(f"{SECOND_SIGNAL if self._begun else TOO_EARLY}\n")
            return INTERRUPTED
        if code < 0:
            sys.stderr.write(f"the run was ended by {signal.Signals(-code).name}\n")
            return FAILED
        return code


def _catch() -> tuple[int, int]:
    """Make signals to this process do nothing but write their numbers to a pipe.

    Returns the ends of the pipe: (read, write).
    """
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGCHLD):
        signal.signal(number, _ignore)
    # Ray starts the command of a job with SIGINT blocked, so that it would never arrive.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})
    return read, write


def _ignore(*_: object) -> None:
    """Do nothing, as the handler of a signal. With SIG_IGN instead, the child's processes would inherit the setting."""


def _caught(pipe: int) -> list[int]:
    """Read the pipe, and return the numbers of the signals in it, without SIGCHLD."""
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
    # The child is in the background of its terminal, where `stty tostop` would stop it when it prints.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = _worked(work, Signals(parent))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may have ended
            stream.flush()
    # Not sys.exit, which waits for threads, and for Ray again. All files are closed, and the parent ends the remaining processes.
    os._exit(code)


def _worked(work: Callable[[Signals], object], signals: Signals) -> int:
    """Call `work`, and return the exit code with which Python would end after it."""
    try:
        work(signals)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else 0
    except BaseException:  # noqa: BLE001  # printed as Python prints it
        sys.excepthook(*sys.exc_info())
        return FAILED
    return 0


def _adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parents have ended. Works on Linux only."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _end_with(parent: int) -> None:
    """Make Linux kill this process when its parent is killed. `attend` alone would detect that only while it waits."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was killed before
        os._exit(FAILED)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def _end_orphans() -> None:
    """Kill the remaining processes of the run. Returns when all have ended, or after REAP_SECONDS.

    They are Ray's processes, if the run had no time to end them.
    """
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
    """Return the ids of the child processes, including zombies. Empty if the kernel does not list child processes.

    The kernel does not reuse the id of a child before this process has waited for the child.
    """
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:  # noqa: PTH123  # pathlib takes long to import
            return [int(child) for child in children.read().split()]
    except FileNotFoundError:  # a kernel without it
        return []


def _received(connection: socket.socket, flags: int = 0) -> bytes | None:
    """Return the bytes that have arrived in a socket. None: no bytes have arrived. b"": the other end is closed.

    flags: flags of recv(2), such as MSG_PEEK.
    """
    try:
        return connection.recv(4096, flags | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        connection.send(message)
