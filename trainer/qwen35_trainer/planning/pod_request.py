"""Decides how much memory the operator requests for a pod.

The request is the memory of the device profile, or more if the plan of the training needs more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.planning.host_memory import PodMemory
from qwen35_trainer.planning.memory_plan import GIB, gib

HOST_RESERVE = 0.1
"""Share of the requested memory that planned bytes leave free, because a plan may be up to 10 % below the bytes of
living tensors (docs/planning.md)."""


@dataclass(frozen=True)
class PodRequest:
    """The memory requested for a pod, in GiB, and the part of it that /dev/shm may take."""

    memory_gib: int
    shm_gib: int


def planned_request(pod: PodMemory, profile: PodRequest) -> PodRequest:
    """Return the memory to request for a pod, at least that of `profile`.

    pod: the planned memory; its total includes /dev/shm. profile: the request of the device profile. /dev/shm gets the
    same fraction of the memory as in `profile`, or more if the plan needs more: Ray sizes its object store by the pod's
    memory, and moves it to a disk if /dev/shm is smaller.
    """
    memory = max(profile.memory_gib, _whole(pod.total))
    share = math.ceil(memory * profile.shm_gib / profile.memory_gib)
    return PodRequest(memory, max(share, min(memory, _whole(pod.shared))))


def request_misfits(pod: PodMemory, request: PodRequest) -> Iterator[Problem]:
    """Yield a problem, with a fix, if `request` has too little memory for the pod, and another if /dev/shm is too small."""
    place = f"spec.pods.{pod.pool}"
    if pod.total > request.memory_gib * GIB:
        yield Problem(
            place,
            f"a pod needs {gib(pod.total)} of memory, and the operator requests {request.memory_gib} GiB.",
            f"Set spec.pods.sizing to Planned, or request at least {gib(pod.total)} in {place}"
            + (", or use more nodes, or offload less." if pod.tensors else ", or use more nodes."),
        )
    if pod.shared > request.shm_gib * GIB:
        yield Problem(
            place,
            f"a pod needs {gib(pod.shared)} in /dev/shm, and the operator gives it {request.shm_gib} GiB.",
            "Set spec.pods.sizing to Planned, or publication.transport to RDMA or Folder, or use more nodes.",
        )


def _whole(size: float) -> int:
    return math.ceil(size / (1 - HOST_RESERVE) / GIB)
