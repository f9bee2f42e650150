"""A run on four Ray nodes with the labels that pods have: `python in_pods.py MANIFEST OUTPUT`, prints a JSON object.

Afterwards, on the same nodes, one of which says that it has two accelerators of each kind, actors with the options that a run without a
cluster gives its workers.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from qwen35_trainer.contract.shared_names import LANE_LABEL, POOL_LABEL
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.runtime import run_command as command
from qwen35_trainer.runtime.link.reporter import Reporter
from qwen35_trainer.runtime.site import connected, worker_options

NODES = (("head", 0, None), ("rollout", 2, "false"), ("rollout", 2, "true"), ("train", 2, None))
"""Pool, CPUs, and whether it is a node of the straggler lane."""
DEVICES = 2
"""Accelerators of each kind that the last node has, as far as Ray knows."""
VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "Ascend": "ASCEND_RT_VISIBLE_DEVICES"}
taken: dict[str, Any] = {}


class Watching(Reporter):
    """Looks at what Ray has left to give once the pools are at work."""

    def replicas(self, hosts: Any, drained: Any) -> None:
        if hosts and not taken:
            taken.update(ray.available_resources())


class Worker:
    """What a worker sees of the machine's accelerators."""

    def visible(self, variable: str) -> str | None:
        return os.environ.get(variable)


def shown() -> dict[str, list[str | None]]:
    """By profile, what each worker of the two pools sees while all of them live."""
    seen: dict[str, list[str | None]] = {}
    for profile, variable in VISIBLE.items():
        job: Any = SimpleNamespace(
            in_cluster=False, spec=SimpleNamespace(accelerator=SimpleNamespace(profile=profile), rollout=None)
        )
        workers = [ray.remote(**worker_options(job, pool))(Worker).remote() for pool in ("rollout", "train")]
        seen[profile] = ray.get([worker.visible.remote(variable) for worker in workers])
    return seen


def main(file: Path, output: Path) -> None:
    cluster = Cluster()
    for pool, cpus, lane in NODES:
        labels = {POOL_LABEL: pool} | ({} if lane is None else {LANE_LABEL: lane})
        node = {"num_cpus": cpus, "object_store_memory": 100_000_000, "labels": labels}
        devices = {"num_gpus": DEVICES, "resources": {"NPU": DEVICES}} if pool == "train" else {}
        cluster.add_node(**node, **devices, include_dashboard=False)
    os.environ["RAY_ADDRESS"] = cluster.address
    finished = command.run(
        load_manifest(file, new=False),
        file=file,
        output=output,
        resume=None,
        console=Console(stderr=True),
        started=time.time(),
        reporter=Watching(),
        in_cluster=True,
    )
    with connected(in_cluster=True):
        visible = shown()
    cluster.shutdown()
    ended = {"outcome": finished.finish.outcome, "message": finished.finish.message}
    print(json.dumps(ended | {"left": taken, "visible": visible}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
