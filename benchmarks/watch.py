"""Runs a command and measures its processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

EVERY_SECONDS = 2.0
"""Seconds between two measurements of the process tree; the cost is negligible."""
IDLE_CORES, PATIENCE_SECONDS = 0.25, 180.0
"""A run starts when others use fewer cores than this, or after this wait."""


@dataclass(frozen=True)
class Seen:
    """Resources that a run used. Memory peaks are those of the sums over all its processes."""

    peak_rss_mib: float
    """Shared pages count in every process that maps them."""
    peak_pss_mib: float
    """Shared pages count once."""
    others_cores: float
    """Mean number of cores used by other processes, including those stolen by the hypervisor."""
    busy_before: float
    """Cores that were busy before the run started."""


class RunFailedError(RuntimeError):
    """The measured command failed."""


def run(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Seen:
    """Run `command` to its end, with all cores, when the machine is quiet. Raises RunFailedError with the end of its log."""
    before = wait_until_quiet()
    started, busy = time.monotonic(), _busy_seconds()
    used: dict[int, float] = {}
    rss = pss = 0
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        root = psutil.Process(process.pid)
        while process.poll() is None:
            now_rss, now_pss, cpu = _look(root)
            rss, pss = max(rss, now_rss), max(pss, now_pss)
            used |= cpu
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EVERY_SECONDS)
    if process.returncode:
        raise RunFailedError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    others = (_busy_seconds() - busy - sum(used.values())) / (time.monotonic() - started)
    return Seen(rss / 2**20, pss / 2**20, max(0.0, others), before)


def wait_until_quiet() -> float:
    """Wait until other processes use few cores, or until a deadline. Returns the cores in use in the last second."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        busy, started = _busy_seconds(), time.monotonic()
        time.sleep(1.0)
        cores = (_busy_seconds() - busy) / (time.monotonic() - started)
        if cores < IDLE_CORES or started > deadline:
            return cores


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _look(root: psutil.Process) -> tuple[int, int, dict[int, float]]:
    """RSS and PSS in bytes, and processor seconds by process id, of a process and its descendants."""
    rss = pss = 0
    used = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory, times = process.memory_full_info(), process.cpu_times()
                rss, pss = rss + memory.rss, pss + memory.pss
                used[process.pid] = times.user + times.system
    return rss, pss, used


def _busy_seconds() -> float:
    """Return the processor seconds of all processes of this machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
