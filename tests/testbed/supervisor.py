"""Runs one command that never outlives the process that asked for it, however that process ends.

    python -IS supervisor.py PARENT GRACE command ...

PARENT is the process id of the caller, GRACE the seconds between SIGTERM and SIGKILL (0: SIGKILL immediately).

    the parent is gone   ─┐
    SIGTERM to us        ─┼─► SIGTERM to the command, GRACE, then SIGKILL to it and all its descendants
    the command ended    ─┘

The parent is watched through a process file descriptor: unlike PR_SET_PDEATHSIG that means the whole process, not
the thread that started us, and unlike a pipe no forked sibling can hold it open. Descendants that turned into
daemons come back to us because we are their subreaper. Should this process itself be killed, the command goes too.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def supervise(parent: int, grace: float, command: list[str]) -> int:
    """Returns the command's exit status, negative for a signal."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request_pipe, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    alive = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 1
    # Safe here: this process has one thread.
    child = subprocess.Popen(
        command,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
    )
    running = os.pidfd_open(child.pid)
    select.select([alive, request_pipe, running], [], [])
    if grace:
        child.terminate()
        select.select([running], [], [], grace)
    child.kill()
    status = child.wait()
    _kill_descendants()
    return status


def _kill_descendants() -> None:
    """Kill children until there are none: a killed child's children become ours."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
