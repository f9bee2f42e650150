"""A run on four Ray nodes with the labels that pods have: `python in_pods.py MANIFEST OUTPUT`, prints a JSON object.

Afterwards, on the same nodes, one of which says that it has two accelerators of each kind, actors with the options that a run without a
cluster gives its workers. At last, with a third node of the rollout pool, two replicas of two nodes each.
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
from qwen35_trainer.runtime.local_node import only_needed_services
from qwen35_trainer.runtime.replica_node import NodeActors
from qwen35_trainer.runtime.site import connected, reserve_nodes, reserved_options, worker_options

NODES = (("head", 0, None), ("rollout", 2, "false"), ("rollout", 2, "true"), ("train", 2, None))
"""Pool, CPUs, and whether it is a node of the straggler lane."""
DEVICES = 2
"""Accelerators of each kind that the last node has, as far as Ray knows."""
VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "Ascend": "ASCEND_RT_VISIBLE_DEVICES"}
LARGE = {"rollout.nodes": 2, "rollout.tensorParallel": 2, "accelerator.devicesPerNode": 1}
"""Replicas that are larger than a node."""
STARTS_SECONDS = 120.0
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


class Placed:
    """A worker on one node of a replica."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def reserved(file: Path) -> dict[str, Any]:
    """Two replicas of two nodes each on three nodes: the nodes of the first, CPUs that are free meanwhile, nodes of the second."""
    spec = load_manifest(file, [f"{name}={value}" for name, value in LARGE.items()]).spec
    job: Any = SimpleNamespace(in_cluster=True, spec=spec)

    def replica() -> NodeActors:
        group = reserve_nodes(job, lane=False)
        options = (reserved_options(job, group, number, lane=False) for number in range(2))
        return NodeActors(tuple(ray.remote(**each)(Placed).remote() for each in options), group)

    def nodes(of: NodeActors) -> list[str]:
        names: list[str] = ray.get([actor.node.remote() for actor in of.actors], timeout=STARTS_SECONDS)
        return names

    first, second = replica(), replica()
    result: dict[str, Any] = {"first": nodes(first), "free": ray.available_resources().get("CPU", 0.0)}
    first.end()
    result["second"] = nodes(second)
    second.end()
    return result


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
        with only_needed_services(1):
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
        with only_needed_services(1):
            cluster.add_node(num_cpus=2, object_store_memory=100_000_000, labels={POOL_LABEL: "rollout"})
        large = reserved(Path(__file__).parents[2] / "examples" / "tiny-grpo-vllm.yaml")
    cluster.shutdown()
    ended = {"outcome": finished.finish.outcome, "message": finished.finish.message}
    print(json.dumps(ended | {"left": taken, "visible": visible, "large": large}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
