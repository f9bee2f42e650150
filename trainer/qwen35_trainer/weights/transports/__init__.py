"""The ways of a version from the train ranks to the replicas.

| transport      | used when                                   | bytes                                                        |
|----------------|---------------------------------------------|--------------------------------------------------------------|
| `sharedMemory` | trainer and replicas are on one Linux host  | each rank writes its shard to its place in one shared segment; replicas map it |
| `objectStore`  | otherwise                                   | each rank puts its shard into Ray's object store in buckets; a replica fetches one bucket at a time |

Both copy the live weights before the optimizer steps again, so that a replica never reads weights that change, however late it is.
NCCL, HCCL, RDMA and IPC are not implemented. The driver imports this module, so it imports torch and Ray only where tensors are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from qwen35_trainer.weights import segment
from qwen35_trainer.weights.published import PublishedWeights, StagedShard
from qwen35_trainer.weights.segment import SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from qwen35_trainer.weights.host_weights import HostWeights
    from qwen35_trainer.weights.staging import WeightShard

type TransportName = Literal["sharedMemory", "objectStore"]


class WeightSender(Protocol):
    """The sending end of a transport, on one train rank."""

    def stage(self, shards: Sequence[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        """Copy this rank's shards to where replicas can fetch them. Collective.

        shards: of the same tensors, in the same order, on all ranks. needed: earlier versions that replicas have or may still
        fetch, whose memory must not be overwritten.
        """
        ...


class WeightReceiver(Protocol):
    """The receiving end of a transport, on a replica."""

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        """Fetch a version of the weights and verify it. It has no deadline of its own: the driver replaces a replica that takes too long.

        Raises WeightsDamaged naming the tensors that are damaged.
        """
        ...


@dataclass(frozen=True)
class RankContext:
    """The number of one train rank, the number of all train ranks, and their process group."""

    rank: int
    ranks: int
    group: ProcessGroup | None
    """A group of all ranks over gloo; None with one rank."""


def choose(*, one_host: bool) -> TransportName:
    """Return the transport of a run. one_host: whether all train workers and replicas are on one machine, outside of pods."""
    return "sharedMemory" if one_host and segment.IS_SUPPORTED else "objectStore"


def sender(name: TransportName, context: RankContext) -> WeightSender:
    """Return the sending end of the transport `name` on one train rank."""
    return _SENDERS[name](context)


def receiver() -> WeightReceiver:
    """Return the receiving end on a replica, which can fetch from every transport."""
    return _Receiver()


class _Receiver:
    def __init__(self) -> None:
        self._ends: dict[TransportName, WeightReceiver] = {}

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        name: TransportName = "sharedMemory" if isinstance(published.source, SegmentHandle) else "objectStore"
        if name not in self._ends:
            self._ends[name] = _RECEIVERS[name]()
        return await self._ends[name].fetch(published)


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


_SENDERS: Mapping[TransportName, Callable[[RankContext], WeightSender]] = {
    "sharedMemory": _shared_memory_sender,
    "objectStore": _object_store_sender,
}
_RECEIVERS: Mapping[TransportName, Callable[[], WeightReceiver]] = {
    "sharedMemory": _shared_memory_receiver,
    "objectStore": _object_store_receiver,
}
