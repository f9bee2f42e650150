"""Measures the time that a cluster adds to a run: apply → first update in pods, and the same job under `qwen35 run`. Prints one JSON object.

    apply ─► RayJob ─► pods ─► scheduled ─► started ─► ready ─► command ─► processes ─► loaded ─► generating ─► first update
             operator  KubeRay  scheduler    kubelet    Ray      KubeRay    imports       model     weights       rollout, training

Each phase ends when its milestone is first seen, by looking every 0.1 s at the API server and at the run's own records.
Rounds take turns: in pods, then on this machine. Images are on the node already, as on a node that has run one before;
the first pull is a matter of the registry. In its place stand the seconds in which the images' large layers are built
(0 when they are cached) and, as a part of the cluster's start, taken into containerd's store. Everything shares this
machine's cores, the control plane too.

    python -m benchmarks.cluster [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from images.definition import definition
from images.layers import base_layers
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import RunRecord, SpanRecord, UpdateRecord
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.release import Release
from tests.testbed import binaries

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-grpo.yaml"
NAME, NAMESPACE = "tiny-grpo", "default"
IMAGES = ("operator", "trainer-cpu")
SECONDS = 600.0
"""Deadline of each run."""
LOOK_SECONDS = 0.1
INSIDE = ("processes", "modelLoad", "weights", "rolloutAndTraining")
"""Phases of the command: until its processes are up, the model is loaded, rollouts have it and the first update is made."""

type Phases = dict[str, float]
type Manifest = dict[str, Any]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    built = binaries.build()
    times = [time.monotonic()]
    for image in IMAGES:
        base_layers(definition(image))
    times.append(time.monotonic())
    with cluster(built, "benchmark", IMAGES) as running:
        times.append(time.monotonic())
        Release(running).install()
        measured = [(_in_pods(running), _alone()) for _ in range(rounds)]
    pods, alone = ([pair[index] for pair in measured] for index in (0, 1))
    phases = {name: median(run[name] for run in pods) for name in pods[0]}
    total = [sum(run.values()) for run in pods]
    print(
        json.dumps(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": {"cores": len(os.sched_getaffinity(0)), "platform": platform.platform()},
                "rounds": rounds,
                **_rounded(dict(zip(("imageLayersSeconds", "clusterReadySeconds"), _gaps(times), strict=True))),
                "applyToFirstUpdateSeconds": _rounded({"median": median(total), "min": min(total), "max": max(total)}),
                "phases": _rounded(phases),
                "operatorShare": round(phases["operator"] / median(total), 4),
                "alone": _rounded({name: median(run[name] for run in alone) for name in alone[0]}),
                "podsToAlone": round(median(a / sum(b.values()) for a, b in zip(total, alone, strict=True)), 2),
            },
            indent=2,
        )
    )


def _in_pods(running: Cluster) -> Phases:
    """Seconds of each phase, for one training that is deleted after its first update."""
    kubectl = ("--namespace", NAMESPACE)
    begun = time.time()
    running.kubectl(*kubectl, "apply", f"--filename={EXAMPLE}")
    seen: dict[str, float] = {"apply": begun}
    milestones: dict[str, Callable[[], bool]] = {
        "operator": lambda: bool(_mine(running, "apis/ray.io/v1", "rayjobs")),
        "kuberay": lambda: len(_pods(running)) == 3,
        "schedule": lambda: all(pod["spec"].get("nodeName") for pod in _pods(running)),
        "start": lambda: all(_started(pod) for pod in _pods(running)),
        "ray": lambda: all(_ready(pod) for pod in _pods(running)),
        "firstUpdate": lambda: any(isinstance(record, UpdateRecord) for record in _records(running)),
    }
    for name, reached in milestones.items():
        _until(reached, name)
        seen[name] = time.time()
    inside = _within(_records(running), seen["firstUpdate"])
    times = [*(seen[name] for name in ("apply", "operator", "kuberay", "schedule", "start", "ray")), *inside]
    names = ("operator", "kuberay", "schedule", "start", "ray", "submit", *INSIDE)
    running.kubectl(*kubectl, "delete", f"--filename={EXAMPLE}")
    _until(lambda: not _pods(running), "the pods' end")
    return dict(zip(names, _gaps([*times, seen["firstUpdate"]]), strict=True))


def _alone() -> Phases:
    """The same job under `qwen35 run`, ended after its first update."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        begun = time.time()
        command = [sys.executable, "-m", "qwen35_trainer.cli", "run", str(EXAMPLE), "--output", str(output)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            _until(lambda: any(isinstance(record, UpdateRecord) for record in _read(output)), "the first update")
            updated = time.time()
            _, *inside = _within(_read(output), updated)
            process.terminate()
            process.wait(SECONDS)
        return dict(zip(INSIDE, _gaps([begun, *inside, updated]), strict=True))


def _within(records: list[RunRecord], updated: float) -> tuple[float, float, float, float]:
    """When the command began, its processes were there, the model was loaded, and it first generated, by the first update's
    own time and when that was seen.
    """
    first = next(record for record in records if isinstance(record, UpdateRecord))
    spans = [record for record in records if isinstance(record, SpanRecord)]
    load = next(span for span in spans if span.kind == "load")
    generating = min(span.start for span in spans if span.kind == "generate")
    command = updated - first.time
    return command, command + load.start, command + load.end, command + generating


def _records(running: Cluster) -> list[RunRecord]:
    """Of the driver, whose folder is on the node as long as its pod is."""
    pods = running.folder / "kubelet" / "root" / "pods"
    heads = [
        pod["metadata"]["uid"] for pod in _pods(running) if pod["metadata"]["labels"]["rl.qwen35.io/pool"] == "head"
    ]
    folders = [pods / uid / "volumes" / "kubernetes.io~empty-dir" / "run" for uid in heads]
    return [record for folder in folders for record in _read(folder)]


def _read(folder: Path) -> list[RunRecord]:
    file = folder / "metrics.jsonl"
    return list(read_records(file)) if file.is_file() else []


def _mine(running: Cluster, group: str, plural: str) -> list[Manifest]:
    path = f"/{group}/namespaces/{NAMESPACE}/{plural}?labelSelector=rl.qwen35.io/training={NAME}"
    return list(running.api.get(path)["items"])


def _pods(running: Cluster) -> list[Manifest]:
    return _mine(running, "api/v1", "pods")


def _started(pod: Manifest) -> bool:
    """Return whether the first container runs or has run: workers begin with one that waits for the head."""
    status = pod["status"]
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return any("waiting" not in container["state"] for container in containers)


def _ready(pod: Manifest) -> bool:
    return all(container["ready"] for container in pod["status"].get("containerStatuses", [{"ready": False}]))


def _until(reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        if time.monotonic() > end:
            sys.exit(f"not within {SECONDS:.0f} s: {what}")
        time.sleep(LOOK_SECONDS)


def _gaps(times: list[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in pairwise(times))


def _rounded(values: Phases) -> Phases:
    return {name: round(value, 2) for name, value in values.items()}


if __name__ == "__main__":
    main()
