"""Measures two operators with many trainings, of which some have clusters and report for half an hour. Prints one JSON object.

    fresh control plane ─► ended ─► clusters ─► reports, with a fail-over in the middle

ended     with KubeRay stopped, N - C trainings are created, report that they have succeeded, and their RayJobs get the status that
          KubeRay gives to a job that has ended. Most trainings of an organisation have ended; suspended ones would be cheaper
          to create, but have fewer objects and shorter statuses, of which the operator's memory consists
clusters  KubeRay starts, and C trainings are created. Ends when the status of each shows three ready pods: a head, a rollout and a
          train pod on nodes of kwok. Every RayCluster's dashboard is `ray_dashboards.py`, in which all jobs run
reports   C drivers (`reporting_trainers.py`) report every few seconds, and every 12th report contains a new checkpoint. They
          begin one after the other within two minutes, as their clusters became ready. In the middle the leading operator is killed (SIGKILL); when the other one leads, the killed one starts again

What is measured of each report, by the clock of this machine:

checkpoint   from the API server's answer to the report until another client's watch shows its checkpoint, or a later one, in
             the training's status. The operator writes checkpoints immediately
numbers      from the time at which the operator may copy the report's numbers until the same watch shows them, or later ones.
             The operator may copy them when an interval has passed since the report that the status showed before
             (`new_status.progress_interval`: 50 s with 500 running trainings), and not before the report

Drivers do not catch up (`reporting_trainers.py`), so a slow API server gets fewer reports: the share of those that it did not answer is
a figure too, as are reports that no status had shown an interval and SHOWN_SECONDS after the last one.

The figures contain the fail-over; `withoutFailover` leaves out the reports answered from FAILOVER_BEFORE_SECONDS before the kill until
FAILOVER_AFTER_SECONDS after the other operator leads. Memory and processor seconds of every process are sampled every 15 s; states,
memory and queues are written to standard error. Both operators are separate processes with the rights of the operator's role, as in operator_scale.py,
and share this machine with the control plane.

Needs root, because the pods' addresses must lead to the dashboards, and port 8265, on all addresses of the machine. With the default
numbers it takes 42 minutes and up to 17 GB of memory. KubeRay reconciles 8 objects of a kind at a time and sends up to 200 requests a second, as in all tests; it logs errors only, because its log of 30 minutes would be 1 GB.

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
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import ray_dashboards, reporting_trainers
from benchmarks.cluster_bed import PODS_PER_CLUSTER, Bed
from benchmarks.cluster_figures import Failover, Measured, figures
from benchmarks.observer import MERGE_PATCH, Json, Observer, each, observing, until
from benchmarks.operator_scale import NAMESPACE, QUIET_SECONDS, training
from benchmarks.process_samples import cores, processor_seconds
from benchmarks.reporting_trainers import Driver, Order
from qwen35_operator.desired import object_names
from qwen35_operator.kube.kinds import CONFIG_MAP, LEASE, POD, RAY_JOB, TRAINING
from qwen35_operator.reconcile.new_status import progress_interval
from qwen35_trainer.contract import ProgressReport
from qwen35_trainer.contract.progress_report import CheckpointReport
from qwen35_trainer.contract.shared_names import PROGRESS_KEY, progress_name
from tests.controlplane import operator_process
from tests.controlplane.operator_process import OperatorProcess
from tests.testbed import binaries
from tests.testbed.control_plane import ControlPlane, control_plane
from tests.testbed.processes import answers
from tests.testbed.ray_head import PORT

DASHBOARDS, TRAINERS = "dashboards", "trainers"
"""Names of the processes that this script adds to the test bed."""
ENVIRONMENT = {"GOMEMLIMIT": "14GiB", "ETCD_QUOTA_BACKEND_BYTES": str(8 * 2**30)}
"""Go collects garbage more often before the API server, the largest process, exceeds this limit. By default, etcd refuses
writes when its file has 2 GiB."""
KUBERAY_OPTIONS = ("--zap-log-level=error",)
SAMPLE_SECONDS = 15.0
SHOWN_SECONDS = 10.0
"""Time after the last interval in which the statuses may still show the last report."""
LEADING_SECONDS = 120.0
"""Maximum time until one operator leads."""
CREATION_SECONDS = 7200.0


def main() -> None:
    options = _arguments()
    load = os.getloadavg()
    # All processes find the same packages as this one.
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        tempfile.TemporaryDirectory(prefix="operator-clusters-", ignore_cleanup_errors=True) as folder,
        control_plane(binaries.find(), Path(folder), environment) as plane,
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
    plane.processes.start(name, [sys.executable, "-m", module, *arguments])


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
        every=0.25,
        seconds=CREATION_SECONDS,
    )
    await each(bed.ended, lambda number: _end(seen, names[number]))
    await until(
        lambda: all(seen.states[name] == "Succeeded" for name in names),
        "every training has succeeded",
        every=0.25,
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
        every=0.25,
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
    ordered = Order(plane.server, str(plane.ca), plane.token, NAMESPACE, drivers, seconds, report_seconds)
    ordered.save(order)
    transitions, began = await _lease_transitions(bed.seen), (await bed.sample()).at
    _start_module(plane, TRAINERS, "benchmarks.reporting_trainers", str(order), str(file))
    await asyncio.sleep(seconds / 2)
    await bed.sample()
    failover = await _fail_over(bed)
    process = plane.processes.running[TRAINERS]
    await until(lambda: process.poll() is not None, "the trainers end", every=1.0, seconds=seconds)
    last = await bed.sample()
    if process.returncode != 0:
        raise RuntimeError(plane.processes.log(TRAINERS).read_text()[-3000:])
    await asyncio.sleep(progress_interval(bed.clusters) + SHOWN_SECONDS)
    answered, transitions = tuple(reporting_trainers.read(file)), await _lease_transitions(bed.seen) - transitions
    samples = [sample for sample in bed.samples if began <= sample.at <= last.at]
    return figures(Measured(bed, answered, samples, failover, ordered.expected)) | {"leaderChanges": transitions}


async def _lease_transitions(seen: Observer) -> int:
    """Return how often the Lease of the operators has changed its holder."""
    lease = await seen.request("GET", LEASE.path(operator_process.LEASE_NAMESPACE, operator_process.USER))
    return int(lease["spec"].get("leaseTransitions", 0))


async def _fail_over(bed: Bed) -> Failover:
    """Kill the leader, wait until the other operator leads, and start the killed one again."""
    await _until_one_leads(bed.operators)
    leader, other = sorted(bed.operators, key=_leads, reverse=True)
    killed = time.monotonic()
    await asyncio.to_thread(leader.kill)
    await _until_one_leads((other,))
    led = time.monotonic()
    await asyncio.to_thread(leader.start)
    return Failover(killed, led)


async def _until_one_leads(operators: Sequence[OperatorProcess]) -> None:
    deadline = time.monotonic() + LEADING_SECONDS
    while sum(await asyncio.to_thread(lambda: [_leads(each) for each in operators])) != 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not one of {len(operators)} operators leads after {LEADING_SECONDS:.0f} s")
        await asyncio.sleep(0.1)


def _leads(operator: OperatorProcess) -> bool:
    try:
        return operator.metrics()["qwen35_leading"] == 1
    except (OSError, HTTPException):
        return False  # it starts, or has just been killed


if __name__ == "__main__":
    main()
