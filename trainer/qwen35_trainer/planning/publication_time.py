"""Seconds of a publication, in three steps.

copy       each train rank copies its shard of the version to its host; training waits
transfer   train nodes send a whole version to each node of every replica; the slowest sender or receiver determines the time. With RDMA,
           replicas serve each other (`weights/relay.py`): train ranks send to as many replicas as they can serve at the same
           time, and each further wave doubles the number of replicas that have the version. Auto, which in pods is ObjectStore, does not
           use the devices' ports, but TCP between the nodes
load       each device of a replica copies its part of the version from its host, between two decode steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen35_trainer.catalog.devices import Device
from qwen35_trainer.catalog.links import LINKS
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning.assumptions import LINK_SHARE, OBJECT_STORE_RATE, STAGING_RATE
from qwen35_trainer.planning.host_memory import version_bytes


@dataclass(frozen=True)
class PublicationTime:
    """The time of one publication of weights, in seconds."""

    copy: float
    """Seconds in which each train rank copies its shard to its host. Training waits."""
    transfer: float
    """Seconds in which the version gets from the train nodes to all replicas. Training and generation continue."""
    load: float
    """Seconds in which a replica copies the version from its host to its devices. The replica does not decode."""


def publication_time(shape: ModelSizes, spec: TrainingSpec, device: Device) -> PublicationTime | None:
    """Return the time of one publication of weights; None if the training has no rollout pool."""
    if spec.rollout is None:
        return None
    version, pool = version_bytes(shape, spec), spec.rollout
    host = LINKS[device.to_host].bandwidth * LINK_SHARE
    network = LINKS[device.between_nodes].bandwidth * LINK_SHARE
    replicas, ranks = max(1, spec.rollout_replicas), spec.world_size
    nodes = spec.nodes_of_replica(lane=False)
    received = version / spec.devices_on_node(lane=False) / network
    if spec.publication.transport == "RDMA":
        first = min(replicas, max(4, ranks // pool.tensorParallel))
        waves = math.ceil(math.log2(replicas / first)) if replicas > first else 0
        transfer = max(version / ranks * first * nodes / network, received) + waves * nodes * received
    elif spec.publication.transport in ("Auto", "ObjectStore"):
        transfer = version * _nodes_served(spec) / OBJECT_STORE_RATE
    else:
        transfer = max(version / ranks * replicas * nodes / network, received)
    staged = host if spec.publication.transport == "RDMA" else min(host, STAGING_RATE)
    copies = version / ranks / staged
    return PublicationTime(copies, transfer, version / pool.tensorParallel / host)


def _nodes_served(spec: TrainingSpec) -> float:
    """Return how many versions the slowest node sends or receives through Ray's object store, which fetches an object once for a node.

    In mode Colocated each node has its own part already, and a single node has all of them.
    """
    train, pool = spec.train.nodes, spec.rollout
    assert pool is not None
    if spec.mode == "Colocated":
        return 1 - 1 / train
    return max(1.0, pool.nodes / train)
