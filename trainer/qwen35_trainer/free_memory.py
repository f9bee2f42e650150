"""The memory that a process may still allocate, on a machine and in a container."""

from pathlib import Path

import psutil

_LIMITS = (
    (".", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files with the memory limit of a container: first for control groups (cgroups) of version 2, then for version 1.

Each entry has a folder, its file with the limit, its file with the memory in use, and the name of a line in
memory.stat. That line has the inactive file pages, which the kernel can reclaim. All values are in bytes.
"""


def free_memory(limits: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still allocate on the machine or, in a container, within its memory limit.

    limits: the folder at which the control groups (cgroups) of the container are mounted.
    """
    free = psutil.virtual_memory().available
    for folder, maximum, usage, files in _LIMITS:
        try:
            limit = (limits / folder / maximum).read_text().strip()
            used = int((limits / folder / usage).read_text())
            lines = (limits / folder / "memory.stat").read_text().splitlines()
        except OSError:  # the other version of control groups, or none
            continue
        # Inactive file pages count as used memory, and the kernel reclaims them when a process needs memory.
        reclaimed = int(dict(line.split() for line in lines)[files])
        return free if limit == "max" else min(free, max(0, int(limit) - used + reclaimed))
    return free
