"""Finds all descendants of a process, even those in other sessions and those whose parents have ended.

    parent:      QWEN35_STARTED_BY=              a process inherits the variable at its start: reading /proc/N/environ
    child:       QWEN35_STARTED_BY=4f1c/         finds all descendants of the child, whatever became of those
    grandchild:  QWEN35_STARTED_BY=4f1c/9a02/    between. The mark of a process is a prefix of the marks of its children.

Other means miss some descendants: a process may leave its process group, the tree of parents ends at a parent that has
ended, and a pod may not use control groups. The search misses a process that was started without its parent's
variables, that has overwritten them with a title, or that belongs to another user. It finds nothing on systems without
/proc.
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
"""Number of searches in a row that must find nothing before the descendants count as ended.

One is not enough, because a process may start another one and end during a search.
"""
_PAUSE_SECONDS: Final = 0.005
"""Pause after each search, in which killed processes end."""


def new_mark() -> dict[str, str]:
    """Return an environment variable for a process about to start, by which `kill_marked` finds its descendants."""
    return {_VARIABLE: f"{os.environ.get(_VARIABLE, '')}{secrets.token_hex(8)}/"}


def kill_marked(mark: dict[str, str]) -> None:
    """Kill the processes with a mark and their descendants, until none is left or _SEARCH_SECONDS have passed.

    mark: the variable from `new_mark`. The call blocks meanwhile. Processes that are left after this time hang in the kernel.
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
    """Return the ids of the processes with a mark. A zombie has no variables, so the list does not contain it."""
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
