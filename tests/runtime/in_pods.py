"""A run on four Ray nodes with the labels that pods have: `python in_pods.py MANIFEST OUTPUT`, prints a JSON object."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from qwen35_trainer.contract.names import POOL_LABEL
from qwen35_trainer.runtime import run as command
from qwen35_trainer.runtime.link.reporter import Reporter
from qwen35_trainer.spec import load_manifest

NODES = (("head", 0), ("rollout", 2), ("rollout", 2), ("train", 2))
"""Pool and CPUs."""
taken: dict[str, Any] = {}


class Watching(Reporter):
    """Looks at what Ray has left to give once the pools are at work."""

    def hosts(self, hosts: Any) -> None:
        if hosts and not taken:
            taken.update(ray.available_resources())


def main(file: Path, output: Path) -> None:
    cluster = Cluster()
    for pool, cpus in NODES:
        node = {"num_cpus": cpus, "object_store_memory": 100_000_000, "labels": {POOL_LABEL: pool}}
        cluster.add_node(**node, include_dashboard=False)
    os.environ["RAY_ADDRESS"] = cluster.address
    finished = command.run(
        load_manifest(file),
        file=file,
        output=output,
        resume=None,
        console=Console(stderr=True),
        started=time.time(),
        reporter=Watching(),
        in_cluster=True,
    )
    cluster.shutdown()
    print(json.dumps({"outcome": finished.finish.outcome, "message": finished.finish.message, "left": taken}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
