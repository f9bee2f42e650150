"""A published version of the weights: its manifest, and where its bytes are.

    train rank: shards ─► a transport: staged ─► StagedShard ─┐
    train rank: shards ─► a transport: staged ─► StagedShard ─┴─► joined ─► PublishedWeights ─► replicas: a transport: HostWeights

The driver imports this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.transfer_agent import RemoteMemory
from qwen35_trainer.weights.weight_manifest import TensorPart, WeightLayout, WeightManifest, WeightsDamaged

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class StoredBucket:
    """Bytes in Ray's object store: consecutive parts of a manifest, each from a multiple of ALIGNMENT bytes."""

    reference: ray.ObjectRef[Any]
    parts: int
    """Number of parts."""


@dataclass(frozen=True)
class StoredBuckets:
    """A version in Ray's object store. Ray keeps the buckets as long as this object exists."""

    buckets: tuple[StoredBucket, ...]


@dataclass(frozen=True)
class RegisteredShard:
    """Registered memory of one train rank: consecutive parts of a manifest, each from a multiple of ALIGNMENT bytes."""

    memory: RemoteMemory
    parts: int
    """Number of parts."""


@dataclass(frozen=True)
class RegisteredShards:
    """A version in registered memory of the train ranks, in the order of its manifest's parts."""

    shards: tuple[RegisteredShard, ...]


@dataclass(frozen=True)
class RegisteredCopy:
    """A version in registered memory of one replica, laid out as its manifest says."""

    memory: RemoteMemory


type WeightSource = SegmentHandle | StoredBuckets | RegisteredShards | RegisteredCopy


@dataclass(frozen=True)
class StagedShard:
    """The copy that one train rank has made for a publication: its parts of the tensors, and where replicas find their bytes."""

    layout: WeightLayout | None
    """Layout of the version, from rank 0; None from other ranks."""
    layout_checksum: int
    """Checksum of the rank's layout. It must be equal on all ranks."""
    parts: tuple[TensorPart, ...]
    source: WeightSource


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the weights that replicas can fetch."""

    manifest: WeightManifest
    source: WeightSource


def joined(shards: Sequence[StagedShard], version: int) -> PublishedWeights:
    """Return the version that consists of the copies of all ranks. shards: in the order of ranks.

    Raises WeightsDamaged if ranks disagree about names, shapes or types, or if tensors are incomplete or were written twice.
    """
    layout = shards[0].layout
    assert layout is not None, "rank 0 comes first"
    if wrong := [rank for rank, shard in enumerate(shards) if shard.layout_checksum != shards[0].layout_checksum]:
        raise WeightsDamaged(
            f"weights of version {version}: ranks {wrong} have other names, shapes or types than rank 0"
        )
    manifest = WeightManifest(version, layout, tuple(part for shard in shards for part in shard.parts))
    manifest.check_complete()
    return PublishedWeights(manifest, _joined_sources([shard.source for shard in shards]))


def _joined_sources(sources: Sequence[WeightSource]) -> WeightSource:
    handles = [source for source in sources if isinstance(source, SegmentHandle)]
    if handles:  # one segment: its holders are all ranks, and any of them is enough to open it
        holders = tuple(holder for handle in handles for holder in handle.holders)
        return replace(handles[0], holders=tuple(dict.fromkeys(holders)))
    if any(isinstance(source, RegisteredShards) for source in sources):
        registered = [source for source in sources if isinstance(source, RegisteredShards)]
        return RegisteredShards(tuple(shard for source in registered for shard in source.shards))
    stored = [source for source in sources if isinstance(source, StoredBuckets)]
    return StoredBuckets(tuple(bucket for source in stored for bucket in source.buckets))
