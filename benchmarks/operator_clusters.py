"""Measures two operators with many trainings, of which some have clusters and report for half an hour. Prints one JSON object.

    fresh control plane ─► ended ─► clusters ─► reports, with a fail-over in the middle

ended     with KubeRay stopped, N - C trainings are created, report that they have succeeded, and their RayJobs get the status that
          KubeRay gives to a job that has ended. Most trainings of an organisation have ended; suspended ones would be cheaper
          to create, but have fewer objects and shorter statuses, of which the operator's memory consists
clusters  KubeRay starts, and C trainings are created. Ends when the status of each shows three ready pods: a head, a rollout and a
          train pod on nodes of kwok. Every RayCluster's dashboard is `ray_dashboards.py`, in which all jobs run
reports   C drivers (`reporting_trainers.py`) report every few seconds, and every 12th report contains a new checkpoint.
          In the middle the leading operator is killed (SIGKILL); when the other one leads, the killed one starts again

What is measured of each report, by the clock of this machine:

checkpoint   from the API server's answer to the report until another client's watch shows its checkpoint, or a later one, in
             the training's status. The operator writes checkpoints immediately
numbers      from the time at which the operator may copy the report's numbers until the same watch shows them, or later ones.
             The operator may copy them when an interval has passed since the report that the status showed before
             (`new_status.progress_interval`: 10 s for up to 500 running trainings), and not before the report

The figures contain the fail-over; `withoutFailover` leaves out the reports from FAILOVER_BEFORE_SECONDS before the kill until
FAILOVER_AFTER_SECONDS after the other operator leads. Memory and processor seconds of every process are sampled every 15 s and
written to standard error. Both operators are separate processes with the rights of the operator's role, as in operator_scale.py,
and share this machine with the control plane.

Needs root, because the pods' addresses must lead to the dashboards, and port 8265. KubeRay reconciles 8 objects of a kind at a
time and sends up to 200 requests a second, as in all tests; it logs errors only, because its log of 30 minutes would be 1 GB.

    python -m benchmarks.operator_clusters [--trainings 5000] [--clusters 500] [--minutes 30] [--report-seconds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import ray_dashboards, reporting_trainers
from benchmarks.observer import MERGE_PATCH, Json, Observer, each, observing, until
from benchmarks.operator_scale import NAMESPACE, QUIET_SECONDS, training
from benchmarks.process_samples import Sample, cores, processor_seconds, requests_sent
from benchmarks.report_delays import (
    Delay,
    at_share,
    checkpoint_delays,
    growth,
    number_delays,
    spread_of,
    windows,
    without,
)
from benchmarks.reporting_trainers import Answered, Driver, Order
from qwen35_operator.desired import object_names
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_JOB, TRAINING
from qwen35_operator.reconcile.new_status import progress_interval
from qwen35_trainer.contract import ProgressReport
from qwen35_trainer.contract.progress_report import CheckpointReport
from qwen35_trainer.contract.shared_names import PROGRESS_KEY, progress_name
from tests.controlplane import operator_process
from tests.controlplane.operator_process import OperatorProcess
from tests.testbed import binaries, kuberay, kwok
from tests.testbed.control_plane import ControlPlane, control_plane
from tests.testbed.processes import answers
from tests.testbed.ray_head import PORT

DASHBOARDS, TRAINERS = "dashboards", "trainers"
"""Names of the processes that this script adds to the test bed."""
CONTROL_PLANE = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", kuberay.NAME, kwok.NAME)
PODS_PER_CLUSTER = 3
KUBERAY_OPTIONS = ("--zap-log-level=error",)
SAMPLE_SECONDS = 15.0
WINDOW_SECONDS = 300.0
FAILOVER_BEFORE_SECONDS, FAILOVER_AFTER_SECONDS = 15.0, 30.0
SHOWN_SECONDS = 20.0
"""Time after the last report in which the statuses may still show it."""
CREATION_SECONDS = 7200.0
MAX_DELAY_SECONDS = 2.0
MAX_RSS_MIB = 500e6 / 2**20
MAX_GROWTH = 1.1
"""Limit for the memory of the last third of the time over that of the first third."""


@dataclass
class Bed:
    """The control plane with both operators and what has been seen. ended, clusters: numbers of trainings."""

    plane: ControlPlane
    operators: tuple[OperatorProcess, OperatorProcess]
    seen: Observer
    ended: int
    clusters: int
    samples: list[Sample] = field(default_factory=list)

    def name(self, number: int) -> str:
        """Return the name of a training with a cluster."""
        return f"running{number}"

    @property
    def ready_clusters(self) -> int:
        """Number of trainings whose cluster is ready, by their statuses."""
        ready = self.seen.ready_pods
        return sum(ready.get(self.name(number)) == PODS_PER_CLUSTER for number in range(self.clusters))

    async def sample(self) -> Sample:
        """Take a sample, keep it, and write its main figures to standard error."""
        sample = await asyncio.to_thread(Sample.of, self.plane, self.operators)
        self.samples.append(sample)
        rss = {name: round(use.rss_mib) for name, use in sample.processes.items()}
        queues = {name: use.queue_length for name, use in sample.operators.items()}
        line = {
            "at": round(sample.at, 1),
            "states": Counter(self.seen.states.values()),
            "readyClusters": self.ready_clusters,
        }
        line |= {"rssMiB": rss, "queueLength": queues}
        print(json.dumps(line), file=sys.stderr, flush=True)
        return sample


@dataclass(frozen=True)
class Failover:
    """killed, led: monotonic times at which the leader was killed, and at which the other operator led."""

    killed: float
    led: float


def main() -> None:
    options = _arguments()
    load = os.getloadavg()
    with (
        tempfile.TemporaryDirectory(prefix="operator-clusters-", ignore_cleanup_errors=True) as folder,
        control_plane(binaries.find(), Path(folder)) as plane,
    ):
        if plane.pods.unreachable:
            sys.exit(plane.pods.unreachable)
        result = asyncio.run(_measure(plane, options))
    print(json.dumps(_header(load) | result, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two operators and reporting clusters; prints one JSON object.")
    parser.add_argument("--trainings", type=int, default=5000, help="number of trainings")
    parser.add_argument(
        "--clusters", type=int, default=500, help="how many of them run in a cluster; the others have ended"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="time in which they report")
    parser.add_argument("--report-seconds", type=float, default=5.0, help="time between two reports of a training")
    return parser.parse_args()


def _header(load: tuple[float, float, float]) -> Json:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": cores(), "system": platform.platform(), "loadBefore": load},
        "versions": {"python": platform.python_version(), "apiServer": binaries.KUBERNETES}
        | {package: version(package) for package in ("kopf", "kubernetes", "aiohttp", "pydantic")},
    }


async def _measure(plane: ControlPlane, options: argparse.Namespace) -> Json:
    """All phases, on an empty control plane."""
    plane.stop_kuberay()
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    rights = operator_process.user(plane, operator_process.rules())
    first, second = (operator_process.process(plane, rights, name=f"operator-{letter}") for letter in "ab")
    for operator in (first, second):
        await asyncio.to_thread(operator.start)
    await asyncio.to_thread(_start_dashboards, plane)
    async with observing(plane.api, TRAINING.path(NAMESPACE), RAY_JOB.path(NAMESPACE)) as seen:
        bed = Bed(plane, (first, second), seen, options.trainings - options.clusters, options.clusters)
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(_sample_regularly(bed))
            created = {
                "ended": await _used(bed, _create_ended(bed)),
                "clusters": await _used(bed, _create_clusters(bed)),
            }
            reports = await _reports(bed, 60 * options.minutes, options.report_seconds)
            sampling.cancel()
        return reports | {"rayJobs": await _job_states(seen), "created": created}


def _start_dashboards(plane: ControlPlane) -> None:
    _start_module(plane, DASHBOARDS, "benchmarks.ray_dashboards")
    plane.processes.wait(DASHBOARDS, answers(f"http://127.0.0.1:{PORT}{ray_dashboards.READY_PATH}"))


def _start_module(plane: ControlPlane, name: str, module: str, *arguments: str) -> None:
    """Start a module of this repository, which finds the same packages as this process."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    plane.processes.start(name, [sys.executable, "-m", module, *arguments], environment=environment)


async def _sample_regularly(bed: Bed) -> None:
    while True:
        await bed.sample()
        await asyncio.sleep(SAMPLE_SECONDS)


async def _used(bed: Bed, phase: Coroutine[Any, Any, None]) -> Json:
    """Return the time that a phase took, and the processor seconds of each process."""
    before = await bed.sample()
    await phase
    both = (before, await bed.sample())
    cpu = {name: round(processor_seconds(both, name), 1) for name in both[1].processes}
    return {
        "seconds": round(both[1].at - before.at, 1),
        "cpuSeconds": cpu,
        "cpuSecondsTogether": round(sum(cpu.values())),
    }


async def _job_states(seen: Observer) -> dict[str, int]:
    """Return the number of RayJobs in each state of KubeRay's."""
    jobs = (await seen.request("GET", seen.jobs))["items"]
    return dict(Counter(job["status"].get("jobDeploymentStatus", "") for job in jobs))


async def _create_ended(bed: Bed) -> None:
    seen, names = bed.seen, [f"ended{number}" for number in range(bed.ended)]
    await each(bed.ended, lambda number: seen.request("POST", seen.trainings, training(names[number])))
    await until(
        lambda: len(seen.added) == len(seen.states) == bed.ended,
        "every training has a RayJob and a state",
        seconds=CREATION_SECONDS,
    )
    await each(bed.ended, lambda number: _end(seen, names[number]))
    await until(
        lambda: all(seen.states[name] == "Succeeded" for name in names),
        "every training has succeeded",
        seconds=CREATION_SECONDS,
    )


async def _end(seen: Observer, name: str) -> None:
    """Send the last report of a training, and then do what KubeRay does when the job has ended. Without KubeRay the RayJob has no RayCluster."""
    now = time.time()
    saved = CheckpointReport(uri="/run/checkpoints/300", update=300, time=now)
    report = ProgressReport(
        attempt=1, cluster="", state="Succeeded", time=now, update=300, updates=300, reward=0.9, checkpoint=saved
    )
    body = {"data": {PROGRESS_KEY: report.model_dump_json(exclude_none=True)}}
    await seen.request("PATCH", CONFIG_MAP.path(NAMESPACE, progress_name(name)), body, MERGE_PATCH)
    ended = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    job = object_names.job_name(name, 1)
    status = {
        "jobDeploymentStatus": "Complete",
        "jobStatus": "SUCCEEDED",
        "jobId": job,
        "rayClusterName": f"{job}-gone",
    }
    status |= {"startTime": ended, "endTime": ended}
    await seen.request("PATCH", f"{seen.jobs}/{job}/status", {"status": status}, MERGE_PATCH)


async def _create_clusters(bed: Bed) -> None:
    await asyncio.to_thread(bed.plane.start_kuberay, *KUBERAY_OPTIONS)
    await each(bed.clusters, lambda number: bed.seen.request("POST", bed.seen.trainings, training(bed.name(number))))
    await until(
        lambda: bed.ready_clusters == bed.clusters,
        f"every training has {PODS_PER_CLUSTER} ready pods",
        every=0.1,
        seconds=CREATION_SECONDS,
    )


async def _drivers(bed: Bed) -> tuple[Driver, ...]:
    """Return the driver of each cluster. Raises RuntimeError unless each cluster has exactly one pod of each pool."""
    pods: dict[str, dict[str, Json]] = {bed.name(number): {} for number in range(bed.clusters)}
    listed = (await bed.seen.request("GET", POD.path(NAMESPACE)))["items"]
    for pod in listed:
        labels = pod["metadata"]["labels"]
        pods[labels[object_names.TRAINING]][labels[object_names.POOL]] = pod["metadata"]
    if len(listed) != PODS_PER_CLUSTER * bed.clusters or any(len(own) != PODS_PER_CLUSTER for own in pods.values()):
        raise RuntimeError(f"{len(listed)} pods for {bed.clusters} clusters of {PODS_PER_CLUSTER}")
    return tuple(
        Driver(name, own["head"]["labels"]["ray.io/cluster"], own["head"]["name"], own["rollout"]["name"])
        for name, own in pods.items()
    )


async def _reports(bed: Bed, seconds: float, report_seconds: float) -> Json:
    plane = bed.plane
    await asyncio.sleep(QUIET_SECONDS)
    order, file = plane.folder / "order.json", plane.folder / "reports.txt"
    drivers = await _drivers(bed)
    Order(plane.server, str(plane.ca), plane.token, NAMESPACE, drivers, seconds, report_seconds).save(order)
    began = (await bed.sample()).at
    _start_module(plane, TRAINERS, "benchmarks.reporting_trainers", str(order), str(file))
    await asyncio.sleep(seconds / 2)
    await bed.sample()
    failover = await asyncio.to_thread(_fail_over, bed)
    process = plane.processes.running[TRAINERS]
    await until(lambda: process.poll() is not None, "the trainers end", every=1.0, seconds=seconds)
    last = await bed.sample()
    if process.returncode != 0:
        raise RuntimeError(plane.processes.log(TRAINERS).read_text()[-3000:])
    await asyncio.sleep(SHOWN_SECONDS)
    answered = tuple(reporting_trainers.read(file))
    samples = [sample for sample in bed.samples if began <= sample.at <= last.at]
    return _figures(Measured(bed, answered, samples, failover, report_seconds))


def _fail_over(bed: Bed) -> Failover:
    """Kill the leader, wait until the other operator leads, and start the killed one again."""
    leader, other = sorted(bed.operators, key=_leads, reverse=True)
    killed = time.monotonic()
    leader.kill()
    while not _leads(other):
        time.sleep(0.1)
    led = time.monotonic()
    leader.start()
    return Failover(killed, led)


def _leads(operator: OperatorProcess) -> bool:
    return operator.metrics()["qwen35_leading"] == 1


@dataclass(frozen=True)
class Measured:
    """Everything that was noted while the trainers reported."""

    bed: Bed
    answered: tuple[Answered, ...]
    samples: list[Sample]
    failover: Failover
    report_seconds: float

    @property
    def seconds(self) -> float:
        return self.samples[-1].at - self.samples[0].at

    def checkpoints(self) -> list[Delay]:
        return [
            delay
            for name, reports in self._reports(checkpoints=True).items()
            for delay in checkpoint_delays(reports, self.bed.seen.saved.get(name, []))
        ]

    def numbers(self) -> list[Delay]:
        interval = progress_interval(self.bed.clusters)
        return [
            delay
            for name, reports in self._reports().items()
            for delay in number_delays(reports, self.bed.seen.copies.get(name, []), interval)
        ]

    def _reports(self, *, checkpoints: bool = False) -> dict[str, dict[int, float]]:
        """Return when the reports of each training were answered, by their updates. checkpoints: only those with a new one."""
        found: dict[str, dict[int, float]] = {}
        for report in self.answered:
            if report.checkpoint or not checkpoints:
                found.setdefault(report.training, {})[report.update] = report.at
        return found


def _figures(measured: Measured) -> Json:
    delays = {"checkpoint": measured.checkpoints(), "numbers": measured.numbers()}
    memory, bed = _memory(measured), measured.bed
    figures = {f"{name}P99Seconds": (spread_of(found).get("p99"), MAX_DELAY_SECONDS) for name, found in delays.items()}
    figures |= {
        f"{name}P99SecondsWithoutFailover": (_spread_without(measured, found).get("p99"), MAX_DELAY_SECONDS)
        for name, found in delays.items()
    }
    figures |= {"peakRssMiB": (memory["peakMiB"], MAX_RSS_MIB), "rssGrowth": (memory["growth"], MAX_GROWTH)}
    states = Counter(bed.seen.states[bed.name(number)] for number in range(bed.clusters))
    return {
        "trainings": bed.ended + bed.clusters,
        "clusters": bed.clusters,
        "seconds": round(measured.seconds, 1),
        "aims": {
            name: {"value": value, "atMost": round(aim, 1), "reached": value is not None and value <= aim}
            for name, (value, aim) in figures.items()
        },
        "reports": {name: _report_figures(measured, found) for name, found in delays.items()}
        | {
            "answered": len(measured.answered),
            "expected": round(bed.clusters * measured.seconds / measured.report_seconds),
        },
        "failover": _failover_figures(measured, delays),
        "memory": memory,
        "processors": _processors(measured),
        "operators": _operators(measured),
        "states": dict(states),
        "restarts": sum(name.startswith("running") for name in bed.seen.added) - bed.clusters,
    }


def _report_figures(measured: Measured, delays: Sequence[Delay]) -> Json:
    return spread_of(delays) | {
        "withoutFailover": _spread_without(measured, delays),
        "windows": windows(delays, measured.samples[0].at, measured.seconds, WINDOW_SECONDS),
    }


def _spread_without(measured: Measured, delays: Sequence[Delay]) -> Json:
    return spread_of(without(delays, *_around(measured.failover)))


def _around(failover: Failover) -> tuple[float, float]:
    """Return the first and the last moment at which a report may be delayed by the fail-over."""
    return failover.killed - FAILOVER_BEFORE_SECONDS, failover.led + FAILOVER_AFTER_SECONDS


def _failover_figures(measured: Measured, delays: Mapping[str, Sequence[Delay]]) -> Json:
    first, last = _around(measured.failover)
    longest = {
        name: max((delay.seconds for delay in found if first <= delay.answered <= last), default=None)
        for name, found in delays.items()
    }
    return {
        "secondsUntilTheOtherLeads": round(measured.failover.led - measured.failover.killed, 2),
        "longestDelaySeconds": {name: None if most is None else round(most, 2) for name, most in longest.items()},
    }


def _memory(measured: Measured) -> Json:
    """Return the memory of the operators, and that of each process after 10, 50 and 100 % of the time."""
    names = [operator.name for operator in measured.bed.operators]
    series: dict[str, list[float]] = {}
    for sample in measured.samples:
        for name, use in sample.processes.items():
            series.setdefault(name, []).append(use.rss_mib)
    peaks = [
        use.peak_rss_mib for sample in measured.bed.samples for name, use in sample.processes.items() if name in names
    ]
    return {
        "peakMiB": round(max(peaks), 1),
        "growth": round(growth([sample.rss_mib(names) for sample in measured.samples]), 3),
        "rssMiB": {
            name: {f"{share:.0%}": round(at_share(values, share)) for share in (0.1, 0.5, 1.0)}
            for name, values in sorted(series.items())
        },
    }


def _processors(measured: Measured) -> Json:
    """Return the mean number of processors that each process used; `others` is everything else on the machine."""
    names = {name for sample in measured.samples for name in sample.processes}
    used = {name: processor_seconds(measured.samples, name) / measured.seconds for name in sorted(names)}
    busy = (measured.samples[-1].busy - measured.samples[0].busy) / measured.seconds
    control = sum(used.get(name, 0.0) for name in CONTROL_PLANE)
    return {
        "cores": {name: round(value, 3) for name, value in used.items()}
        | {"others": round(busy - sum(used.values()), 3)},
        "busyCores": round(busy, 3),
        "controlPlaneCores": round(control, 3),
        "controlPlaneShare": round(control / cores(), 3),
    }


def _operators(measured: Measured) -> Json:
    found = {}
    for operator in measured.bed.operators:
        queues = [
            sample.operators[operator.name].queue_length
            for sample in measured.samples
            if operator.name in sample.operators
        ]
        found[operator.name] = {
            "requestsPerSecond": round(requests_sent(measured.samples, operator.name) / measured.seconds, 2),
            "maxQueueLength": max(queues),
            "bugsInTheLog": operator.log.count("this is a bug"),
        }
    return found


if __name__ == "__main__":
    main()
