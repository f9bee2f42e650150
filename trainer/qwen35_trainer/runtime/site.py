"""Places the processes of a run: starts or connects to Ray, sets the workers' resources, and numbers the train ranks.

on this machine   a local Ray, which ends with the run; the workers share the cores, and each has a separate accelerator
in a cluster      the Ray of the pods: the driver runs in the head pod, like `qwen35 run`, and the workers in the pods of their pool

    worker 0: node B, device 1                rank 0: node A, device 0
    worker 1: node A, device 0      ─►        rank 1: node A, device 1
    worker 2: node B, device 0                rank 2: node B, device 0
    worker 3: node A, device 1                rank 3: node B, device 1

In mode Colocated the ranks take the devices, and each replica joins ranks on their node:

    node A: device 0 ── rank 0 ┐                  node A: device 2 ── rank 2 ┐
            device 1 ── rank 1 ┴─ rollout-0               device 3 ── rank 3 ┴─ rollout-1       (tensorParallel 2)

Ray places the workers on any free device. The ranks that exchange data in every layer are neighbouring ranks,
so ranks are numbered by node and device. With another numbering, these exchanges would leave the node, and take
many times longer.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from qwen35_trainer.contract.shared_names import LANE_LABEL, POOL_LABEL
from qwen35_trainer.manifest import ParallelismSpec
from qwen35_trainer.runtime.job import Job
from qwen35_trainer.runtime.local_node import only_needed_services

type ActorPoolName = Literal["rollout", "train"]

DEVICE_RESOURCES = {"NVIDIA": "GPU", "Ascend": "NPU"}
"""Accelerator profile (`spec.accelerator.profile`) → Ray resource that a worker needs. The profile CPU needs none."""


MAX_RAY_STARTS = 3
"""Maximum number of tries to start Ray on this machine."""
RAY_TIMEOUT_TEXT = "timed out during startup"
"""Part of the message of Ray's exception for a node that did not start in time."""
KILL_WAIT_SECONDS = 10.0
"""Maximum wait, in seconds, for killed processes to end."""

logger = logging.getLogger(__name__)


@contextmanager
def connected(*, in_cluster: bool, workers: int = 1) -> Iterator[None]:
    """Context manager: connect to the cluster's Ray if `in_cluster`, otherwise start Ray on this machine.

    workers: maximum number of workers that a Ray on this machine starts in advance, before actors need them.

    At the end, Ray is disconnected, and a Ray that was started here ends. Use this in a thread that lives until Ray has
    ended, because Linux ends Ray's processes with the thread that started them.
    """
    if in_cluster:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    else:
        _start(workers)
    try:
        yield
    finally:
        ray.shutdown()


def _start(workers: int) -> None:
    """Start Ray on this machine, with at most MAX_RAY_STARTS tries if Ray's node does not start in time.

    The node has only the services that a run uses (local_node.py). Before the next try, the processes of the failed one
    are killed. Ray allows a node 30 seconds to start (ray/_private/node.py, 2.60.0), which is too little on a very busy
    machine or right after Ray was installed. At a second start the modules are compiled and cached.
    Raises Ray's exception if the last try fails, or if a try fails for another reason.
    """
    for start in range(1, MAX_RAY_STARTS + 1):
        try:
            with only_needed_services(workers):
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises a bare Exception here
            if RAY_TIMEOUT_TEXT not in str(error) or start == MAX_RAY_STARTS:
                raise
            logger.warning("Ray did not start within its own time limit. It is started again.")
            _end_what_started()
        else:
            return


def _end_what_started() -> None:
    """Kill the processes of a failed start of Ray. Without this, they would run until this process ends."""
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
    """Return Ray's options for the driver.

    The driver must run on the node of this process, because it writes to the run's folder.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": here}


def worker_options(
    job: Job, pool: ActorPoolName, *, lane: bool = False, place: SharedPlace | None = None
) -> dict[str, Any]:
    """Return Ray's options for each worker of a pool.

    lane: whether the worker is a replica of the straggler lane (replicas for long sequences). place: the devices of
    train workers that a replica shares; None: Ray assigns devices to the worker. A replica that is larger than a node has
    a worker on each of its nodes: `reserved_options`.

    Ray must not restart a lost worker, because its state is lost. Workers need no placement group: labels assign them
    to the pods of their pool, or of the lane, and these pods exist before the run starts. The lane has separate pods
    because its replicas have another size. In shared pods, the free devices could be spread over several pods, and a
    replica needs all its devices in one pod. The driver calls replicas all the time, so Ray does not record these calls
    (`ray list tasks`): recording takes the driver a sixth of the time of a call.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "enable_task_events": pool != "rollout"}
    if place is not None:
        return options | {"scheduling_strategy": NodeAffinitySchedulingStrategy(place.node, soft=False)}
    device = DEVICE_RESOURCES.get(job.spec.accelerator.profile)
    devices = job.spec.devices_on_node(lane=lane) if pool == "rollout" and job.spec.rollout is not None else 1
    wanted = {} if device is None else {"num_gpus": devices} if device == "GPU" else {"resources": {device: devices}}
    options |= wanted
    if not job.in_cluster:
        return options  # the workers' numbers of threads divide the cores of this machine, not Ray's slots
    return options | {"num_cpus": worker_cpus(job, pool) * devices, "label_selector": _labels(job, pool, lane=lane)}


def _labels(job: Job, pool: ActorPoolName, *, lane: bool) -> dict[str, str]:
    """Return the labels of the pods in which the workers of a pool, or of the straggler lane, run."""
    labels: dict[str, str] = {POOL_LABEL: pool}
    if pool == "rollout" and job.spec.lane_nodes:
        labels[LANE_LABEL] = "true" if lane else "false"
    return labels


def reserve_nodes(job: Job, *, lane: bool) -> PlacementGroup | None:
    """Reserve the pods of a replica that is larger than a node, all of them or none. Returns None outside of a cluster.

    Without a reservation, each of two replicas could hold some pods and wait for those that the other one holds. The call does
    not wait: Ray starts the workers when it has found enough pods. lane: as for `worker_options`.
    """
    if not job.in_cluster:
        return None
    options, count = worker_options(job, "rollout", lane=lane), job.spec.nodes_of_replica(lane=lane)
    amounts = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)} | options.get("resources", {})
    bundle = {name: float(amount) for name, amount in amounts.items() if amount}
    labels = [options["label_selector"]] * count
    reserved: PlacementGroup = placement_group([bundle] * count, strategy="STRICT_SPREAD", bundle_label_selector=labels)
    return reserved


def reserved_options(job: Job, reserved: PlacementGroup | None, node: int, *, lane: bool) -> dict[str, Any]:
    """Return Ray's options for the worker on one node of a replica that is larger than a node.

    reserved: from `reserve_nodes`. node: number of the node in the replica. lane: as for `worker_options`.
    """
    options = worker_options(job, "rollout", lane=lane)
    if reserved is None:
        return options
    options.pop("label_selector")  # that of the reservation
    return options | {"scheduling_strategy": PlacementGroupSchedulingStrategy(reserved, node)}


def worker_cpus(job: Job, pool: ActorPoolName) -> int:
    """Return the number of CPUs for each device of a pool in a cluster, at least 1.

    All pods of a pool are equal, so the CPUs of a pod are divided by its number of devices.
    """
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    pods = [node["Resources"] for node in nodes if node["Alive"] and node["Labels"].get(POOL_LABEL) == pool]
    cpus = min((resources.get("CPU", 0.0) for resources in pods), default=1.0)
    return max(1, int(cpus) // job.spec.accelerator.devicesPerNode)


@dataclass(frozen=True)
class WorkerLocation:
    """The node and the device of a train worker."""

    host: str
    node: str
    """Ray's name of the node."""
    device: str
    """Index or UUID of the worker's accelerator. Empty if the worker has no accelerator."""


@dataclass(frozen=True)
class SharedPlace:
    """The devices of train workers that a replica shares, and Ray's name of the node that has these devices."""

    node: str
    devices: tuple[str, ...]
    """Indices or UUIDs of the devices. Empty without accelerators."""


def shared_places(locations: Sequence[WorkerLocation], sizes: Sequence[int]) -> list[SharedPlace]:
    """Return, for each replica, the devices that it shares with train workers. All devices of a replica are on one node.

    locations: node and device of each train worker. sizes: number of devices of each replica. The devices are assigned
    in the order of their nodes. Raises ValueError if a replica would get devices of two nodes, or if too few devices
    are left for it.
    """
    order = rank_order(locations, ())
    places, start = [], 0
    for number, size in enumerate(sizes):
        chosen = [locations[worker] for worker in order[start : start + size]]
        start += size
        if len(chosen) < size or len({each.node for each in chosen}) > 1:
            raise ValueError(
                f"spec.rollout.tensorParallel: replica {number} needs {size} devices of one node, and the train workers have "
                "fewer left there. Use a divisor of accelerator.devicesPerNode"
            )
        places.append(SharedPlace(chosen[0].node, tuple(each.device for each in chosen if each.device)))
    return places


def neighbour_groups(parallelism: ParallelismSpec, ranks: int) -> tuple[int, ...]:
    """Return the sizes of the groups of neighbouring ranks that should share a node, in ascending order.

    The groups are the ranks that share a sequence (tensor × context), the ranks that share the experts of a layer, and
    the ranks that together hold one of several copies of the model. The result contains each size once. Each size is
    larger than 1, smaller than `ranks`, a divisor of `ranks`, and a multiple of the previous size. Other sizes are left
    out.
    """
    wanted = (
        parallelism.tensor * parallelism.context,
        parallelism.expert * parallelism.expertTensor,
        ranks // parallelism.copies,
    )
    sizes: list[int] = []
    for size in wanted:
        if size % (sizes[-1] if sizes else 1) == 0 and 1 < size < ranks and ranks % size == 0 and size not in sizes:
            sizes.append(size)
    return tuple(sizes)


def rank_order(locations: Sequence[WorkerLocation], groups: Sequence[int]) -> tuple[int, ...]:
    """Return the workers in the order of their ranks, as indices of `locations`.

    groups: sizes of groups of neighbouring ranks, as `neighbour_groups` returns them. As many groups of each size as
    possible lie within one node. Nodes are in the order of their hosts' names, and the workers of a node in the order of
    their devices. If the number of workers of a node is not a multiple of a group's size, the remaining workers of the
    node come after the complete groups of all nodes. In this remainder, nodes with more workers come first.
    """
    on_node: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for worker in sorted(range(len(locations)), key=lambda worker: _natural(locations[worker].device)):
        on_node[locations[worker].host, locations[worker].node].append(worker)
    nodes = [on_node[key] for key in sorted(on_node, key=lambda key: (_natural(key[0]), key[1]))]
    order: list[int] = []
    for size in sorted(groups, reverse=True):
        for workers in nodes:
            complete = len(workers) // size * size
            order += workers[:complete]
            del workers[:complete]
    if groups:
        nodes.sort(key=len, reverse=True)  # larger remainders first, so that fewer nodes share a group
    for workers in nodes:
        order += workers
    return tuple(order)


def _natural(name: str) -> list[str | int]:
    """Return a key that sorts names by the numbers in them: device 10 comes after device 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
