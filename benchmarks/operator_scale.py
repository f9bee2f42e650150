"""Measures how the cost of the operator grows with the number of trainings, on a real API server. Prints one JSON object.

    for each size: fresh control plane ─► create ─► run ─► settle ─► idle ─► events ─► apply

create   N trainings are posted together; ends when each has its RayJob and a state
run      each trainer's first report; ends when each training is Running
settle   the operator restarts; ends when it has reconciled every training and its queue is empty
idle     nothing happens
events   trainers report new checkpoints, 50 a second; latency until another client's watch shows it in the status
apply    trainings one after another, each together with a bare RayJob; latency from sending the POST to the RayJob's ADDED event

The operator is a separate process with the rights of its role. No pods run: KubeRay is stopped, because on a small machine its
clusters would take most of the measured time. The script replaces the trainers by writing `-progress`. etcd, the API server, the
controller manager and this script share the machine with the operator: wall times contain them, processor seconds do not.

    python -m benchmarks.operator_scale [--sizes 100 1000 5000]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import yaml

from benchmarks.look import Look, reconciles
from benchmarks.observer import MERGE_PATCH, Json, Observer, each, observing, paced, spread, until
from qwen35_operator.kube.kinds import CONFIG_MAP, RAY_JOB, TRAINING
from qwen35_trainer.contract import ProgressReport
from qwen35_trainer.contract.progress_report import CheckpointReport
from qwen35_trainer.contract.shared_names import PROGRESS_KEY, progress_name
from tests.controlplane import operator_process
from tests.controlplane.operator_process import OperatorProcess
from tests.testbed import binaries
from tests.testbed.control_plane import ControlPlane, control_plane

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-grpo.yaml"
NAMESPACE = "scale"
EVENTS_PER_SECOND = 50
QUIET_SECONDS = 5.0
"""Before idleness is measured: what the last phase has started has ended by then."""
AIMS: dict[str, tuple[Callable[[Json], float], float]] = {
    "settleCpuSeconds": (lambda result: result["settle"]["cpuSeconds"], 60.0),
    "peakRssMiB": (
        lambda result: max(result[phase]["peakRssMiB"] for phase in ("create", "run", "settle", "events")),
        381.5,
    ),
    "eventToStatusP99Seconds": (lambda result: result["events"]["p99"], 1.0),
    "idleRequestsPerMinutePerTraining": (lambda result: result["idle"]["requestsPerMinutePerTraining"], 0.1),
    "applyToRayJobOverheadP99Seconds": (lambda result: result["apply"]["overheadP99"], 0.5),
}
"""Limits for the figures of the largest size."""


@dataclass(frozen=True)
class Bed:
    """One control plane with the operator, as the phases use it."""

    plane: ControlPlane
    operator: OperatorProcess
    seen: Observer
    size: int

    def look(self) -> Look:
        return Look.of(self.plane, self.operator)


def main() -> None:
    options = _arguments()
    load = os.getloadavg()
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}  # all processes find the same packages as this one
    results = {}
    for size in options.sizes:
        with (
            tempfile.TemporaryDirectory(prefix="operator-scale-", ignore_cleanup_errors=True) as folder,
            control_plane(binaries.find(), Path(folder), environment) as plane,
        ):
            results[size] = asyncio.run(_measure(plane, size, options))
    print(json.dumps(_report(results, load), indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The operator with many trainings; prints one JSON object.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 5000], help="numbers of trainings")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--event-seconds", type=float, default=30.0)
    parser.add_argument("--pairs", type=int, default=100, help="trainings applied one after another, at least 40")
    return parser.parse_args()


async def _measure(plane: ControlPlane, size: int, options: argparse.Namespace) -> Json:
    """All phases, on an empty control plane."""
    plane.stop_kuberay()
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    rights = operator_process.user(plane, operator_process.rules())
    operator = operator_process.process(plane, rights)
    async with observing(plane.api, TRAINING.path(NAMESPACE), RAY_JOB.path(NAMESPACE)) as seen:
        bed = Bed(plane, operator, seen, size)
        phases: dict[str, Callable[[], Awaitable[Json]]] = {
            "create": lambda: create(bed),
            "run": lambda: run(bed),
            "settle": lambda: _settle(bed),
            "idle": lambda: _idle(bed, options.idle_seconds),
            "events": lambda: events(bed, round(EVENTS_PER_SECOND * options.event_seconds)),
            "apply": lambda: _apply(bed, options.pairs),
        }
        measured = {}
        for name, phase in phases.items():
            measured[name] = await phase()
            print(f"{size} trainings, {name}: {json.dumps(measured[name])}", file=sys.stderr, flush=True)
    return measured


async def create(bed: Bed) -> Json:
    await asyncio.to_thread(bed.operator.start)
    before, seen = bed.look(), bed.seen
    await each(bed.size, lambda number: seen.request("POST", seen.trainings, training(f"t{number}")))
    posted = time.monotonic() - before.at
    await until(lambda: len(seen.added) == len(seen.states) == bed.size, "every training has a RayJob and a state")
    return bed.look().since(before, bed.size) | {"postedSeconds": round(posted, 2)}


async def run(bed: Bed) -> Json:
    before, seen = bed.look(), bed.seen
    await each(bed.size, lambda number: save(seen, f"t{number}", 0))
    await until(lambda: all(state == "Running" for state in seen.states.values()), "every training is Running")
    return bed.look().since(before, bed.size)


async def _settle(bed: Bed) -> Json:
    await asyncio.to_thread(bed.operator.stop)
    before = Look.before_birth(bed.plane)
    await asyncio.to_thread(bed.operator.start)

    def settled() -> bool:
        now = bed.operator.metrics()
        counted = sum(value for name, value in now.items() if name.startswith("qwen35_trainings{"))
        return reconciles(now) >= bed.size == counted and now["qwen35_queue_length"] == 0

    await until(settled, "the operator has reconciled every training", every=0.25)
    return bed.look().since(before, bed.size)


async def _idle(bed: Bed, seconds: float) -> Json:
    await asyncio.sleep(QUIET_SECONDS)
    before = bed.look()
    await asyncio.sleep(seconds)
    passed = bed.look().since(before, bed.size)
    return passed | {"requestsPerMinutePerTraining": round(passed["requestsPerTraining"] * 60 / passed["seconds"], 4)}


async def events(bed: Bed, count: int, per_second: float = EVENTS_PER_SECOND, first: int = 1) -> Json:
    """Measure how long events take to reach the status.

    Every event is of another training than the one before, and of a checkpoint that its training has not had.
    first: number of the first checkpoint.
    """
    before, seen = bed.look(), bed.seen
    answered: dict[int, float] = {}

    async def event(number: int) -> None:
        await save(seen, f"t{number % bed.size}", first + number)
        answered[number] = time.monotonic()

    def shown(number: int) -> float | None:
        """A later checkpoint of the training shows that this one was seen too."""
        return next((at for at, update in seen.saved[f"t{number % bed.size}"] if update >= first + number), None)

    await paced(count, per_second, event)
    await until(lambda: all(shown(number) is not None for number in range(count)), "every event is in a status")
    latencies = [max(0.0, (shown(number) or 0.0) - at) for number, at in answered.items()]
    return bed.look().since(before, bed.size) | spread(latencies)


async def _apply(bed: Bed, pairs: int) -> Json:
    seen = bed.seen
    spec = (await seen.request("GET", f"{seen.jobs}/t0-1"))["spec"]
    through, bare = [], []

    async def one(path: str, body: Json, job: str) -> float:
        sent = time.monotonic()
        await seen.request("POST", path, body)
        await until(lambda: job in seen.added, f"RayJob {job}", every=0.005)
        return seen.added[job] - sent

    for number in range(pairs):
        through.append(await one(seen.trainings, training(f"applied{number}"), f"applied{number}-1"))
        job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": f"bare{number}"}, "spec": spec}
        bare.append(await one(seen.jobs, job, f"bare{number}"))
    ours, alone = spread(through), spread(bare)
    over = {f"overhead{rank.upper()}": round(ours[rank] - alone[rank], 4) for rank in ("p50", "p99")}
    return {"training": ours, "bareRayJob": alone} | over


@cache
def _example() -> Json:
    document: Json = yaml.safe_load(EXAMPLE.read_text())
    return document


def training(name: str) -> Json:
    return _example() | {"metadata": {"name": name}}


async def save(seen: Observer, training: str, update: int) -> None:
    """Send the trainer's report after this checkpoint. It names no RayCluster: without KubeRay the RayJob has none."""
    now = time.time()
    saved = CheckpointReport(uri=f"/run/checkpoints/{update}", update=update, time=now)
    report = ProgressReport(attempt=1, cluster="", state="Running", time=now, phase="training", checkpoint=saved)
    body = {"data": {PROGRESS_KEY: report.model_dump_json(exclude_none=True)}}
    await seen.request("PATCH", CONFIG_MAP.path(NAMESPACE, progress_name(training)), body, MERGE_PATCH)


def _report(results: dict[int, Json], load: tuple[float, float, float]) -> Json:
    sizes = sorted(results)
    biggest = results[sizes[-1]]
    figures = {name: (figure(biggest), aim) for name, (figure, aim) in AIMS.items()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": len(os.sched_getaffinity(0)), "system": platform.platform(), "loadBefore": load},
        "versions": {"python": platform.python_version(), "apiServer": binaries.KUBERNETES}
        | {package: version(package) for package in ("kopf", "kubernetes", "aiohttp", "pydantic")},
        "aims": {
            name: {"value": value, "atMost": aim, "reached": value <= aim} for name, (value, aim) in figures.items()
        },
        "growth": {
            f"{large}/{small}": {
                phase: round(results[large][phase]["cpuMsPerTraining"] / results[small][phase]["cpuMsPerTraining"], 3)
                for phase in ("create", "run", "settle")
            }
            for small, large in itertools.pairwise(sizes)
        },
        "sizes": results,
    }


if __name__ == "__main__":
    main()
