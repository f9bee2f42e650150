"""Memory and processor time of every process of a test bed, and the metrics of operators, at one moment."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import psutil

from benchmarks.look import reconciles
from tests.controlplane.operator_process import OperatorProcess
from tests.testbed.control_plane import ControlPlane

MEASURING = "measuring"
"""Name of this process, which watches and samples."""


@dataclass(frozen=True)
class ProcessUse:
    """The use of one process. cpu: processor seconds since its start."""

    pid: int
    cpu: float
    rss_mib: float
    peak_rss_mib: float


@dataclass(frozen=True)
class OperatorUse:
    """The counts of an operator since its start, from its metrics."""

    requests: float
    reconciles: float
    queue_length: float
    leading: bool


@dataclass(frozen=True)
class Sample:
    """All processes by their names, and the operators among them that answer. busy: processor seconds of the machine."""

    at: float
    busy: float
    processes: Mapping[str, ProcessUse]
    operators: Mapping[str, OperatorUse]

    @classmethod
    def of(cls, plane: ControlPlane, operators: Sequence[OperatorProcess]) -> Sample:
        supervisors = dict(plane.processes.running)
        uses = {name: _use_under(supervisor.pid) for name, supervisor in supervisors.items()}
        processes = {name: use for name, use in uses.items() if use is not None}
        counted = {operator.name: _counts(operator) for operator in operators if operator.name in processes}
        times = psutil.cpu_times()
        return cls(
            at=time.monotonic(),
            busy=float(sum(times) - times.idle - times.iowait - times.steal - times.guest - times.guest_nice),
            processes=processes | {MEASURING: _use(psutil.Process())},
            operators={name: counts for name, counts in counted.items() if counts is not None},
        )


def memory_of_runs(samples: Sequence[Sample], name: str) -> list[list[float]]:
    """Return the resident memory of a process in each sample, in MiB: a list for each of its runs, which restarts divide."""
    runs: dict[int, list[float]] = {}
    for sample in samples:
        if (use := sample.processes.get(name)) is not None:
            runs.setdefault(use.pid, []).append(use.rss_mib)
    return list(runs.values())


def processor_seconds(samples: Sequence[Sample], name: str) -> float:
    """Return the processor time of a process between the first and the last sample.

    After a restart of the process, its time since the restart counts; what it used between its last sample and its end is lost.
    """
    uses = [sample.processes.get(name) for sample in samples]
    total, last = 0.0, uses[0]
    for use in uses[1:]:
        if use is not None:
            total += use.cpu - (last.cpu if last is not None and last.pid == use.pid else 0.0)
            last = use
    return total


def requests_sent(samples: Sequence[Sample], name: str) -> float:
    """Return the requests of an operator between the first and the last sample, counted as `processor_seconds` does."""
    counts = [sample.operators[name].requests for sample in samples if name in sample.operators]
    return sum(after - before if after >= before else after for before, after in itertools.pairwise(counts))


def _use_under(supervisor: int) -> ProcessUse | None:
    """Return the use of the process that a supervisor started; None if it has ended."""
    try:
        return next((_use(child) for child in psutil.Process(supervisor).children()), None)
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, KeyError):  # one that is ending has no memory
        return None


def _use(process: psutil.Process) -> ProcessUse:
    times = process.cpu_times()
    memory = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    rss, peak = (int(memory[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return ProcessUse(process.pid, float(times.user + times.system), rss, peak)


def _counts(operator: OperatorProcess) -> OperatorUse | None:
    """Return None for an operator that does not answer, because it starts or has just ended."""
    try:
        metrics = operator.metrics()
    except (OSError, HTTPException):
        return None
    return OperatorUse(
        requests=sum(value for name, value in metrics.items() if name.startswith("qwen35_api_requests_total{")),
        reconciles=reconciles(metrics),
        queue_length=metrics["qwen35_queue_length"],
        leading=metrics["qwen35_leading"] == 1,
    )


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
