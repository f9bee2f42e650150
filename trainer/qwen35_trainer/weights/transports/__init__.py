"""The transports that bring a version from the train ranks to the replicas.

| transport      | used when                                   | bytes                                                        |
|----------------|---------------------------------------------|--------------------------------------------------------------|
| `SharedMemory` | trainer and replicas are on one Linux host  | each rank writes its shard to its place in one shared segment; replicas map the segment |
| `ObjectStore`  | otherwise                                   | each rank puts its shard into Ray's object store in buckets; a replica fetches one bucket at a time |
| `Folder`       | the manifest chooses it                     | each rank writes its shard to a file of a folder that all pods mount; a replica reads one bucket at a time |
| `RDMA`         | the manifest chooses it; it needs NIXL      | each rank writes its shard to registered memory; replicas read all shards without help of the ranks |

All transports copy the live weights before the optimizer steps again, so that even a late replica never reads weights that change.
`spec.publication.transport` names a transport; Auto takes the first that works. With ObjectStore and Folder, a version may be
published as changes to the version before (`shard_streams`, `spec.publication.wholeEvery`). docs/architecture.md says why no
transport uses NCCL, HCCL or IPC. The driver imports this module, so it imports torch, Ray and NIXL only where tensors are copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from qwen35_trainer.manifest import ManifestError, Problem
from qwen35_trainer.manifest.publication import (
    DEFAULT_BUCKET_MEBIBYTES,
    NO_SHARED_MEMORY,
    TransportChoice,
    TransportName,
)
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

        shards: one for each tensor, in the same order on all ranks. needed: earlier versions that replicas have or
        may still fetch; their memory must not be overwritten. Returns the parts that this rank has written, and where
        they are.
        """
        ...


class WeightReceiver(Protocol):
    """The receiving end of a transport, on a replica."""

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        """Fetch a version of the weights and verify its checksums.

        Raises WeightsDamaged, naming the damaged tensors, or an error of the transport, such as SourceLost,
        SegmentUnavailable or PublicationGone. The call has no deadline: the driver replaces a replica that takes
        too long.
        """
        ...


@runtime_checkable
class RelayingReceiver(WeightReceiver, Protocol):
    """A receiving end on a replica from whose memory other replicas can read the version that it has fetched."""

    @property
    def copy(self) -> RegisteredCopy | None:
        """The memory in which other replicas can read the version that was fetched last. None: it cannot be read.

        The version stays in this memory at least until the receiver begins to fetch the second version after it.
        """
        ...


@dataclass(frozen=True)
class RankContext:
    """One train rank: its number, the number of all train ranks, their process group, and publication settings."""

    rank: int
    ranks: int
    group: ProcessGroup | None
    """Process group of all train ranks that sends Python objects (gloo). None: there is only one rank."""
    folder: Path | None = None
    """Folder of this run's publications, for the transport Folder; None with any other transport."""
    whole_every: int = 1
    """Every `whole_every`-th version is published whole, and all others as changes. 1: all versions are whole."""
    replica: ReplicaShape = field(default_factory=ReplicaShape)
    """The shape of the replicas.

    SharedMemory and RDMA stage tensors so that each rank of a replica of this shape can read only its slices.
    """
    bucket_bytes: int = DEFAULT_BUCKET_MEBIBYTES * 2**20
    """Maximum size of a bucket, with ObjectStore and Folder."""


@dataclass(frozen=True)
class Transport:
    """An entry of TRANSPORTS: how to create both ends of a transport, and whether it can be used."""

    sender: Callable[[RankContext], WeightSender]
    receiver: Callable[[], WeightReceiver]
    sources: tuple[type[WeightSource], ...]
    """Types of `PublishedWeights.source` that the receiving end can fetch.

    A replica chooses the transport by these types.
    """
    refusal: Callable[[bool], Problem | None]
    """Returns the reason why the transport cannot be used, or None if it can.

    The argument is whether all train workers and replicas are on one machine, outside of pods.
    """


def choose(wanted: TransportChoice, *, one_host: bool) -> TransportName:
    """Return the name of the transport of a run.

    wanted: `spec.publication.transport`; Auto means the first of TRANSPORTS that can be used. one_host: whether all
    train workers and replicas are on one machine, outside of pods. Raises ManifestError, with the fix, if the wanted
    transport cannot be used.
    """
    if wanted == "Auto":
        return next(name for name, transport in TRANSPORTS.items() if transport.refusal(one_host) is None)
    if (problem := TRANSPORTS[wanted].refusal(one_host)) is not None:
        raise ManifestError(None, [problem])
    return wanted


def sender(name: TransportName, context: RankContext) -> WeightSender:
    """Return the sending end of the transport `name` for one train rank."""
    return TRANSPORTS[name].sender(context)


def receiver() -> RelayingReceiver:
    """Return a receiving end for a replica, which can fetch from every transport."""
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
"""Name in the manifest → transport, in the order in which Auto tries the transports.

ObjectStore can always be used, so Auto never takes a later one. Only a transfer can show whether RDMA works between
all nodes.
"""
