"""The number of processes that score.

cores   scoring processes   processes of a plain function, together
2       1                   8
16      2                   32
64      8                   64
128     8                   64

A scoring process decodes about 100 responses of 32,000 tokens in a second. A function that computes needs a process
per core; one that waits for something else needs one per call, so it gets more than there are cores, and they are
started only while calls wait (isolated.py).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CORES_PER_SCORING_PROCESS: Final = 8
_MAX_SCORING_PROCESSES: Final = 8
_FUNCTION_PROCESSES_PER_CORE: Final = 2
_MIN_FUNCTION_PROCESSES: Final = 8
_MAX_FUNCTION_PROCESSES: Final = 64
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class ProcessLimits:
    """The numbers of processes of one machine.

    scoring: number of scoring processes. functions: maximum number of processes of each plain function, in each scoring
    process. cores: maximum number of those while no call is slow.
    """

    scoring: int = 1
    functions: int = _MIN_FUNCTION_PROCESSES
    cores: int = 1

    @classmethod
    def of(cls, cores: int) -> ProcessLimits:
        """Return the limits on a machine or in a pod with that many cores.

        Half of them may compute rewards that are fast.
        """
        scoring = min(_MAX_SCORING_PROCESSES, max(1, cores // _CORES_PER_SCORING_PROCESS))
        wanted = max(_MIN_FUNCTION_PROCESSES, _FUNCTION_PROCESSES_PER_CORE * cores)
        functions = -(-min(_MAX_FUNCTION_PROCESSES, wanted) // scoring)
        return cls(scoring, functions, max(1, min(functions, cores // 2 // scoring)))


def usable_cores(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Return the number of cores that this process may use: the machine's, within its affinity and its pod's limit."""
    # Only Linux reports the affinity, and has the file: "quota period" in microseconds, or "max period".
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cgroup_limit.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
