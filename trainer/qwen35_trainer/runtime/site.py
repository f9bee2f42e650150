"""Where the processes of a run are.

on this machine   a Ray of the run's own, which ends with it; its cores are shared out, and each worker has an accelerator of its own
in a cluster      the Ray of the pods: the driver beside `qwen35 run` on the head, workers in the pods of their pool
"""

from __future__ import annotations

import contextlib
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
"""Maximum number of times that Ray is started on this machine."""
TIMED_OUT = "timed out during startup"
"""In the message of Ray's exception when its node did not come up in time."""
KILL_WAIT_SECONDS = 10.0
"""Longest wait for killed processes to be gone."""

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
    """Start Ray. If its node times out, end what was started and try again, at most STARTS times.

    Ray gives a node 30 seconds (ray/_private/node.py, 2.60.0), and the node's agents less. The agents import many modules, which
    takes longer on a busy machine or right after Ray was installed. A second start finds those compiled and cached.
    """
    for start in range(1, STARTS + 1):
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises a bare Exception here
            if TIMED_OUT not in str(error) or start == STARTS:
                raise
            logger.warning("Ray did not start within its own time limit. It is started again.")
            _end_what_started()
        else:
            return


def _end_what_started() -> None:
    """End the processes of a Ray that did not start, which Ray itself leaves until this process ends."""
    ray_folder = str(Path(ray.__file__).parent)
    children = psutil.Process().children()
    parents = {
        str(child.pid) for child in children
    }  # a raylet that has ended is still one of them: it is not waited for
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            agent = (
                process.environ().get("RAY_RAYLET_PID") in parents
            )  # not our child any more when its raylet has ended
            if agent or (process in children and ray_folder in " ".join(process.cmdline())):
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=KILL_WAIT_SECONDS)


def driver_options() -> dict[str, Any]:
    """The driver runs beside this process: it writes the run's folder."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": here}


def worker_options(job: Job, pool: Pool) -> dict[str, Any]:
    """What Ray is asked for, for each worker of a pool. A lost worker never comes back as it was."""
    device = DEVICE.get(job.spec.accelerator.profile)
    wanted = {} if device is None else {"num_gpus": 1} if device == "GPU" else {"resources": {device: 1}}
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0} | wanted
    if not job.in_cluster:
        return options  # threads, not Ray's slots, share out this machine's cores
    return options | {"num_cpus": worker_cpus(job, pool), "label_selector": {POOL_LABEL: pool}}


def worker_cpus(job: Job, pool: Pool) -> int:
    """CPUs of each worker of a pool in a cluster: its pods are alike, and have a worker for each device."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    pods = [node["Resources"] for node in nodes if node["Alive"] and node["Labels"].get(POOL_LABEL) == pool]
    cpus = min((resources.get("CPU", 0.0) for resources in pods), default=1.0)
    return max(1, int(cpus) // job.spec.accelerator.perNode)
