"""The processes that a process has started, also those in sessions of their own and those whose parents have ended.

    parent:  QWEN35_STARTED_BY=                  a process inherits the variable at its start: reading /proc/N/environ
    child:   QWEN35_STARTED_BY=4f1c/             finds all processes that came from a child, whatever became of those
    its own: QWEN35_STARTED_BY=4f1c/9a02/        between. Children of a child have its mark as a prefix of theirs.

A pod may use no control groups, and neither a process group nor the tree of parents contains such a process. It is missed only
if it was started without the variables of its parent, if it writes a title over them, on systems without /proc, and if it belongs to
another user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Final

_VARIABLE: Final = "QWEN35_STARTED_BY"
_PROCESSES: Final = Path("/proc")
_SEARCH_SECONDS: Final = 2.0
_EMPTY_SEARCHES: Final = 2
"""Searches in a row that find nothing: a process may start another and end during one."""
_PAUSE_SECONDS: Final = 0.005
"""Time in which a killed process ends."""


def new_mark() -> dict[str, str]:
    """Return the variable of a process that is about to start, by which its descendants are found."""
    return {_VARIABLE: f"{os.environ.get(_VARIABLE, '')}{secrets.token_hex(8)}/"}


def kill_marked(mark: dict[str, str]) -> None:
    """Kill the processes with a mark and their descendants, until there are none. Blocks, at most about _SEARCH_SECONDS."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    empty = 0
    while empty < _EMPTY_SEARCHES:
        marked = _marked(mark)
        empty = 0 if marked else empty + 1
        for process in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return  # it hangs in the kernel, for example on a dead network file system
        time.sleep(_PAUSE_SECONDS)


def _marked(mark: dict[str, str]) -> list[int]:
    """Return the processes with a mark. A process that has ended and was not waited for has no variables."""
    if not _PROCESSES.is_dir():
        return []
    processes = []
    wanted = f"\0{_VARIABLE}={mark[_VARIABLE]}".encode()
    for entry in _PROCESSES.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in b"\0" + (entry / "environ").read_bytes():
                    processes.append(int(entry.name))
    return processes
