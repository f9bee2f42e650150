"""Where the processes of a run are.

on this machine   a Ray of the run's own, which ends with it; its cores are shared out
in a cluster      the Ray of the pods: the driver beside `qwen35 run` on the head, workers in the pods of their pool
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qwen35_trainer.contract.names import POOL_LABEL
from qwen35_trainer.runtime.job import Job

type Pool = Literal["rollout", "train"]

DEVICE = {"nvidia": "GPU", "ascend": "NPU"}
"""What a worker takes of Ray, by spec.accelerator.profile."""


STARTS = 3
"""How often Ray's start is tried on this machine."""
END_SECONDS = 10.0
"""How long a killed process may take to end."""

logger = logging.getLogger(__name__)


@contextmanager
def connected(*, in_cluster: bool) -> Iterator[None]:
    """With Ray, in this thread until its end: see signals.py."""
    if in_cluster:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    else:
        _start()
    try:
        yield
    finally:
        ray.shutdown()


def _start() -> None:
    """Start a Ray, again when its node did not come up in time.

    Ray gives a node 30 seconds (ray/_private/node.py, 2.60.0) and the node's agents less. They import much, and on a machine that
    is busy, or has just installed Ray, that takes longer once. By the next start most of it has been read and compiled.
    """
    for left in reversed(range(STARTS)):
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray has no class for it
            if "timed out during startup" not in str(error) or not left:
                raise
            logger.warning("Ray did not start within its own time limit. It is started again.")
            _end_what_started()
        else:
            return


def _end_what_started() -> None:
    """End the processes of a Ray that did not start, which Ray itself leaves until this process ends."""
    ours = str(Path(ray.__file__).parent)
    children = psutil.Process().children()
    started = [child for child in children if ours in " ".join(child.as_dict(["cmdline"])["cmdline"] or ())]
    for process in started:
        process.kill()
    psutil.wait_procs(started, timeout=END_SECONDS)


def driver_options() -> dict[str, Any]:
    """The driver runs beside this process: it writes the run's folder."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": here}


def worker_options(job: Job, pool: Pool) -> dict[str, Any]:
    """What Ray is asked for, for each worker of a pool. A lost worker never comes back as it was."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if not job.in_cluster:
        return options  # threads, not Ray's slots, share out this machine's cores
    device = DEVICE.get(job.spec.accelerator.profile)
    wanted = {} if device is None else {"num_gpus": 1} if device == "GPU" else {"resources": {device: 1}}
    return options | {"num_cpus": worker_cpus(job, pool), "label_selector": {POOL_LABEL: pool}} | wanted


def worker_cpus(job: Job, pool: Pool) -> int:
    """CPUs of each worker of a pool in a cluster: its pods are alike, and have a worker for each device."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    pods = [node["Resources"] for node in nodes if node["Alive"] and node["Labels"].get(POOL_LABEL) == pool]
    cpus = min((resources.get("CPU", 0.0) for resources in pods), default=1.0)
    return max(1, int(cpus) // job.spec.accelerator.perNode)
