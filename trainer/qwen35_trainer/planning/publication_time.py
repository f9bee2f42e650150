"""Seconds of a publication: the copy that blocks the trainer, the way to the replicas, and the copy to their devices.

copy      a rank's share of the version to its host
transfer  the busiest sender or receiver: train nodes send a whole version to every replica, unless replicas serve each other (RDMA,
          `weights/relay.py`: as many replicas as the train ranks can feed together, then twice as many with each wave)
load      a device's part of the version from its host, between two decode steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen35_trainer.catalog.devices import Device
from qwen35_trainer.catalog.links import LINKS
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning.assumptions import LINK_SHARE
from qwen35_trainer.planning.host_memory import version_bytes


@dataclass(frozen=True)
class PublicationTime:
    """Seconds of a publication."""

    copy: float
    transfer: float
    load: float


def publication_time(shape: ModelSizes, spec: TrainingSpec, device: Device) -> PublicationTime | None:
    """Return the time of a publication; None without replicas."""
    if spec.rollout is None:
        return None
    version, pool = version_bytes(shape, spec), spec.rollout
    host = LINKS[device.to_host].bandwidth * LINK_SHARE
    network = LINKS[device.between_nodes].bandwidth * LINK_SHARE
    replicas, ranks = max(1, spec.rollout_replicas), spec.world_size
    received = version / pool.tensorParallel / network
    if spec.publication.transport == "RDMA":
        first = min(replicas, max(4, ranks // pool.tensorParallel))
        waves = math.ceil(math.log2(replicas / first)) if replicas > first else 0
        transfer = max(version / ranks * first / network, received) + waves * received
    else:
        transfer = max(version / ranks * replicas / network, received)
    copies = version / ranks / host
    return PublicationTime(copies, transfer, version / pool.tensorParallel / host)
