"""The placement of a run's processes.

on this machine   a local Ray, which ends with the run; the workers share the cores, and each has its own accelerator
in a cluster      the Ray of the pods: the driver runs in the head pod, like `qwen35 run`, and the workers in the pods of their pool
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

from qwen35_trainer.contract.shared_names import POOL_LABEL
from qwen35_trainer.runtime.job import Job

type ActorPoolName = Literal["rollout", "train"]

DEVICE_RESOURCES = {"NVIDIA": "GPU", "Ascend": "NPU"}
"""spec.accelerator.profile → the Ray resource that a worker takes."""


MAX_RAY_STARTS = 3
"""Maximum number of times that Ray is started on this machine."""
RAY_TIMEOUT_TEXT = "timed out during startup"
"""Part of the message of Ray's exception when its node did not start in time."""
KILL_WAIT_SECONDS = 10.0
"""Maximum wait for killed processes to end."""

logger = logging.getLogger(__name__)


@contextmanager
def connected(*, in_cluster: bool) -> Iterator[None]:
    """Context manager: connect to the cluster's Ray if `in_cluster`, else start one; disconnect at the end.

    Enter it in a thread that lives until Ray has ended: Linux ends Ray's processes with the thread that started them.
    """
    if in_cluster:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    else:
        _start()
    try:
        yield
    finally:
        ray.shutdown()


def _start() -> None:
    """Start Ray. If its node times out, end what was started and try again, at most MAX_RAY_STARTS times.

    Ray allows a node 30 seconds to start (ray/_private/node.py, 2.60.0), and its agents less. The agents import many modules, which
    takes longer on a busy machine or right after Ray was installed. A second start finds the modules compiled and cached.
    """
    for start in range(1, MAX_RAY_STARTS + 1):
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises a bare Exception here
            if RAY_TIMEOUT_TEXT not in str(error) or start == MAX_RAY_STARTS:
                raise
            logger.warning("Ray did not start within its own time limit. It is started again.")
            _end_what_started()
        else:
            return


def _end_what_started() -> None:
    """Kill the processes of a Ray that did not start. Ray would leave them until this process ends."""
    ray_folder = str(Path(ray.__file__).parent)
    children = psutil.Process().children()
    # A raylet that has ended is still among the children, as a zombie. Its agents are not children of this process any more.
    raylets = {str(child.pid) for child in children}
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            is_agent = process.environ().get("RAY_RAYLET_PID") in raylets
            if is_agent or (process in children and ray_folder in " ".join(process.cmdline())):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=KILL_WAIT_SECONDS)


def driver_options() -> dict[str, Any]:
    """Return Ray's options of the driver, which runs on the node of this process because it writes to the run's folder."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": here}


def worker_options(job: Job, pool: ActorPoolName) -> dict[str, Any]:
    """Return Ray's options of each worker of a pool. Ray must not restart a lost worker, because its state is lost.

    Workers need no placement group: a label assigns them to the pods of their pool, which exist before the run starts.
    """
    device = DEVICE_RESOURCES.get(job.spec.accelerator.profile)
    wanted = {} if device is None else {"num_gpus": 1} if device == "GPU" else {"resources": {device: 1}}
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0} | wanted
    if not job.in_cluster:
        return options  # the workers' numbers of threads divide the cores of this machine, not Ray's slots
    return options | {"num_cpus": worker_cpus(job, pool), "label_selector": {POOL_LABEL: pool}}


def worker_cpus(job: Job, pool: ActorPoolName) -> int:
    """Return the CPUs of each worker of a pool in a cluster. The pods of a pool are alike, and have a worker per device."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    pods = [node["Resources"] for node in nodes if node["Alive"] and node["Labels"].get(POOL_LABEL) == pool]
    cpus = min((resources.get("CPU", 0.0) for resources in pods), default=1.0)
    return max(1, int(cpus) // job.spec.accelerator.devicesPerNode)
