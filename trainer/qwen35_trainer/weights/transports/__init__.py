"""The transports that bring a version from the train ranks to the replicas.

| transport      | used when                                   | bytes                                                        |
|----------------|---------------------------------------------|--------------------------------------------------------------|
| `SharedMemory` | trainer and replicas are on one Linux host  | each rank writes its shard to its place in one shared segment; replicas map it |
| `ObjectStore`  | otherwise                                   | each rank puts its shard into Ray's object store in buckets; a replica fetches one bucket at a time |
| `Folder`       | `spec.publication.folder` names one         | each rank writes its shard to a file of a folder that all pods mount; a replica reads one bucket at a time |
| `RDMA`         | it is chosen, and NIXL is installed         | each rank writes its shard to registered memory; replicas read all shards without its help |

All of them copy the live weights before the optimizer steps again, so that a replica never reads weights that change, however late it is.
`spec.publication.transport` names one; Auto takes the first that works. Through the object store and a folder, versions
may travel as changes to the version before (`shard_streams`, `spec.publication.wholeEvery`). docs/architecture.md says why there is none
by NCCL, HCCL or IPC. The
driver imports this module, so it imports torch, Ray and NIXL only where tensors are copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from qwen35_trainer.manifest import ManifestError, Problem
from qwen35_trainer.manifest.publication import NO_SHARED_MEMORY, TransportChoice, TransportName
from qwen35_trainer.weights import segment
from qwen35_trainer.weights.division import ReplicaShape
from qwen35_trainer.weights.published import (
    FolderBuckets,
    PublishedWeights,
    RegisteredCopy,
    RegisteredShards,
    StagedShard,
    StoredBuckets,
    WeightSource,
)
from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.transports import nixl_agent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from qwen35_trainer.weights.host_weights import HostWeights
    from qwen35_trainer.weights.staging import WeightShard


class WeightSender(Protocol):
    """The sending end of a transport, on one train rank."""

    def stage(self, shards: Sequence[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        """Copy this rank's shards to where replicas can fetch them. All ranks must call this together.

        shards: of the same tensors, in the same order, on all ranks. needed: earlier versions that replicas have or may
        still fetch, whose memory must not be overwritten.
        """
        ...


class WeightReceiver(Protocol):
    """The receiving end of a transport, on a replica."""

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        """Fetch a version of the weights and verify it. Raises WeightsDamaged naming the tensors that are damaged.

        It has no deadline of its own: the driver replaces a replica that takes too long.
        """
        ...


@runtime_checkable
class RelayingReceiver(WeightReceiver, Protocol):
    """A receiving end on a replica whose fetched versions other replicas can read."""

    @property
    def copy(self) -> RegisteredCopy | None:
        """The memory in which other replicas can read the version that was fetched last. None: they cannot read it.

        They can read it there until two later versions have been fetched.
        """
        ...


@dataclass(frozen=True)
class RankContext:
    """The number of one train rank, the number of all train ranks, and their process group."""

    rank: int
    ranks: int
    group: ProcessGroup | None
    """Process group of all ranks, which sends objects of the host (gloo). None if there is only one rank."""
    folder: Path | None = None
    """Folder of this run's publications, for the transport Folder; None with any other transport."""
    whole_every: int = 1
    """Number of versions from one that is published whole to the next whole one. 1: all versions are whole.

    The versions between are published as changes.
    """
    replica: ReplicaShape = field(default_factory=ReplicaShape)
    """The shape of the replicas. SharedMemory and RDMA stage tensors so that each rank of such a replica can read its slices."""


@dataclass(frozen=True)
class Transport:
    """An entry of the registry: both ends of a transport, and when it works."""

    sender: Callable[[RankContext], WeightSender]
    receiver: Callable[[], WeightReceiver]
    sources: tuple[type[WeightSource], ...]
    """Types of the descriptions of where a publication's bytes are.

    A replica recognises the transport by these types.
    """
    refusal: Callable[[bool], Problem | None]
    """Returns the problem if the transport cannot be used, or None if it can.

    Its argument is whether trainer and replicas are on one machine.
    """


def choose(wanted: TransportChoice, *, one_host: bool) -> TransportName:
    """Return the transport of a run.

    wanted: `spec.publication.transport`; Auto means the first of TRANSPORTS that works. one_host: whether all train
    workers and replicas are on one machine, outside of pods. Raises ManifestError, with the fix, if the wanted
    transport cannot work there.
    """
    if wanted == "Auto":
        return next(name for name, transport in TRANSPORTS.items() if transport.refusal(one_host) is None)
    if (problem := TRANSPORTS[wanted].refusal(one_host)) is not None:
        raise ManifestError(None, [problem])
    return wanted


def sender(name: TransportName, context: RankContext) -> WeightSender:
    """Return the sending end of the transport `name` on one train rank."""
    return TRANSPORTS[name].sender(context)


def receiver() -> RelayingReceiver:
    """Return the receiving end on a replica, which can fetch from every transport."""
    return _Receiver()


class _Receiver:
    def __init__(self) -> None:
        self._ends: dict[TransportName, WeightReceiver] = {}

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        name = next(name for name, transport in TRANSPORTS.items() if isinstance(published.source, transport.sources))
        if name not in self._ends:
            self._ends[name] = TRANSPORTS[name].receiver()
        return await self._ends[name].fetch(published)

    @property
    def copy(self) -> RegisteredCopy | None:
        end = self._ends.get("RDMA")
        return end.copy if isinstance(end, RelayingReceiver) else None


def _shared_memory_refusal(one_host: bool) -> Problem | None:
    return None if one_host and segment.IS_SUPPORTED else NO_SHARED_MEMORY


def _shared_memory_sender(context: RankContext) -> WeightSender:
    from qwen35_trainer.weights.transports.shared_memory import SharedMemorySender

    return SharedMemorySender(context)


def _shared_memory_receiver() -> WeightReceiver:
    from qwen35_trainer.weights.transports.shared_memory import SharedMemoryReceiver

    return SharedMemoryReceiver()


def _object_store_sender(context: RankContext) -> WeightSender:
    from qwen35_trainer.weights.transports.object_store import ObjectStoreSender

    return ObjectStoreSender(context)


def _object_store_receiver() -> WeightReceiver:
    from qwen35_trainer.weights.transports.object_store import ObjectStoreReceiver

    return ObjectStoreReceiver()


def _folder_sender(context: RankContext) -> WeightSender:
    from qwen35_trainer.weights.transports.folder import FolderSender

    return FolderSender(context)


def _folder_receiver() -> WeightReceiver:
    from qwen35_trainer.weights.transports.folder import FolderReceiver

    return FolderReceiver()


def _rdma_refusal(_: bool) -> Problem | None:
    if nixl_agent.is_installed():
        return None
    message = f"RDMA needs the package {nixl_agent.PACKAGE}, which is not installed."
    fix = f"Use the image trainer-cuda, install {nixl_agent.PACKAGE}, or set it to Auto."
    return Problem("spec.publication.transport", message, fix)


def _rdma_sender(context: RankContext) -> WeightSender:
    from qwen35_trainer.weights.transports.rdma import RdmaSender

    return RdmaSender(context, nixl_agent.NixlAgent())


def _rdma_receiver() -> WeightReceiver:
    from qwen35_trainer.weights.transports.rdma import RdmaReceiver

    return RdmaReceiver(nixl_agent.NixlAgent())


TRANSPORTS: Mapping[TransportName, Transport] = {
    "SharedMemory": Transport(_shared_memory_sender, _shared_memory_receiver, (SegmentHandle,), _shared_memory_refusal),
    "ObjectStore": Transport(_object_store_sender, _object_store_receiver, (StoredBuckets,), lambda _: None),
    "Folder": Transport(_folder_sender, _folder_receiver, (FolderBuckets,), lambda _: None),
    "RDMA": Transport(_rdma_sender, _rdma_receiver, (RegisteredShards, RegisteredCopy), _rdma_refusal),
}
"""Name in the manifest → transport, in the order in which Auto prefers them.

Auto takes none after ObjectStore, which always works. Whether RDMA works between all nodes shows only a transfer.
"""
