"""Find and kill all descendants of a process, even those in other sessions and those whose parents have ended.

    process       mark: its variable in /proc/N/environ    found by the mark 4f1c/
    parent        none                                     no
    child         QWEN35_STARTED_BY=4f1c/                  yes
    grandchild    QWEN35_STARTED_BY=4f1c/9a02/             yes, even if the child has ended

A process inherits the variable of its parent, and `new_mark` only appends to its value. The mark of a process is
therefore a prefix of the marks of all its descendants.

Other ways of searching miss some descendants: a process may leave its process group, the tree of parents breaks at a
parent that has ended, and a pod is not allowed to use control groups. The search by marks misses processes that were
started without their parent's variables, that have overwritten their variables with a process title, or that belong to
another user. It finds nothing on systems without /proc.
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
"""Number of consecutive searches that must find no process before all descendants count as ended.

One search is not enough, because during the search a process may start another one and end."""
_PAUSE_SECONDS: Final = 0.005
"""Pause after each search, so that killed processes can end."""


def new_mark() -> dict[str, str]:
    """Return an environment variable for a process that is about to start.

    `kill_marked` finds the process and its descendants by this variable.
    """
    return {_VARIABLE: f"{os.environ.get(_VARIABLE, '')}{secrets.token_hex(8)}/"}


def kill_marked(mark: dict[str, str]) -> None:
    """Kill the processes with a mark and their descendants, and wait at most _SEARCH_SECONDS until all have ended.

    mark: the variable from `new_mark`. Processes that are left after _SEARCH_SECONDS hang in the kernel.
    """
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
    """Return the ids of all processes whose mark is `mark` or begins with it. Zombies are excluded:
    they have no variables.
    """
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
