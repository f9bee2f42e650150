"""Measures what the operator's process, its control plane and the rest of the machine have used so far."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.observer import Json
from qwen35_operator.kube.kinds import LEASE
from tests.controlplane.operator_process import OperatorProcess
from tests.testbed.control_plane import ControlPlane


@dataclass(frozen=True)
class Look:
    """The operator's process and the machine at one moment. Processor times in seconds since their start."""

    at: float
    cpu: float
    control_plane_cpu: float
    """Of the API server, etcd and the controllers."""
    others_cpu: float
    """Of everything that is not part of the measurement: other programs, and the hypervisor's steal."""
    rss_mib: float
    peak_rss_mib: float
    requests: float
    """To the API server, but for those of leader election, which does not grow with the trainings."""
    lease_requests: float
    reconciles: float

    @classmethod
    def of(cls, plane: ControlPlane, operator: OperatorProcess) -> Look:
        metrics, pid = operator.metrics(), operator.pid
        sent = {name: value for name, value in metrics.items() if name.startswith("qwen35_api_requests_total{")}
        leases = sum(value for name, value in sent.items() if f'resource="{LEASE.plural}"' in name)
        memory = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        own, theirs = _cpu(psutil.Process(pid)), _control_plane_cpu(plane, operator.name)
        return cls(
            at=time.monotonic(),
            cpu=own,
            control_plane_cpu=theirs,
            others_cpu=_busy() - own - theirs - _cpu(psutil.Process()),
            rss_mib=int(memory["VmRSS"].split()[0]) / 1024,
            peak_rss_mib=int(memory["VmHWM"].split()[0]) / 1024,
            requests=sum(sent.values()) - leases,
            lease_requests=leases,
            reconciles=reconciles(metrics),
        )

    @classmethod
    def before_birth(cls, plane: ControlPlane) -> Look:
        """Return the usage as `of` does, before the operator's process is started."""
        theirs = _control_plane_cpu(plane)
        others = _busy() - theirs - _cpu(psutil.Process())
        return cls(time.monotonic(), 0.0, theirs, others, 0.0, 0.0, 0.0, 0.0, 0.0)

    def since(self, before: Look, size: int) -> Json:
        """Return the usage between two looks, as JSON."""
        seconds, cpu = self.at - before.at, self.cpu - before.cpu
        return {
            "seconds": round(seconds, 2),
            "cpuSeconds": round(cpu, 2),
            "cpuShare": round(cpu / seconds, 4),
            "cpuMsPerTraining": round(1e3 * cpu / size, 3),
            "rssMiB": round(self.rss_mib, 1),
            "peakRssMiB": round(self.peak_rss_mib, 1),
            "reconcilesPerTraining": round((self.reconciles - before.reconciles) / size, 3),
            "requestsPerTraining": round((self.requests - before.requests) / size, 3),
            "leaseRequests": round(self.lease_requests - before.lease_requests),
            "controlPlaneCores": round((self.control_plane_cpu - before.control_plane_cpu) / seconds, 3),
            "othersCores": round((self.others_cpu - before.others_cpu) / seconds, 3),
        }


def reconciles(metrics: Mapping[str, float]) -> float:
    """Return the number of reconciles, whatever their results."""
    return sum(value for name, value in metrics.items() if name.startswith("qwen35_reconciles_total{"))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _control_plane_cpu(plane: ControlPlane, operator: str = "") -> float:
    """Return the processor seconds of all processes of the test bed except the operator. Their supervisors only wait."""
    running = plane.processes.running
    supervisors = [psutil.Process(process.pid) for name, process in running.items() if name != operator]
    return sum(_cpu(child) for supervisor in supervisors for child in supervisor.children())


def _busy() -> float:
    """Processor seconds that this machine has spent on anything."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
