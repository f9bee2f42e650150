"""A published version of the weights: its manifest, and where its bytes are.

    train rank: shards ─► a transport: staged ─► StagedShard ─┐
    train rank: shards ─► a transport: staged ─► StagedShard ─┴─► joined ─► PublishedWeights ─► replicas: a transport: HostWeights

The driver imports this module, so it imports no torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qwen35_trainer.weights.probe import Probe
from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.transfer_agent import RemoteMemory
from qwen35_trainer.weights.weight_manifest import TensorPart, WeightLayout, WeightManifest, WeightsDamaged

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The place of a bucket: `size` bytes from byte `offset` of a file."""

    path: str
    """Path of the file, relative to `FolderBuckets.folder`."""
    offset: int
    size: int


class EncodedPart(NamedTuple):
    """One part's encoding in a bucket: its size, and whether it contains all bytes of the part or only changes."""

    size: int
    """Number of bytes of the encoding."""
    changes: int | None
    """Number of changed values, if the encoding contains only these (`changed_values`).

    None: the encoding contains all bytes of the part.
    """


@dataclass(frozen=True)
class WeightBucket:
    """The encodings of consecutive parts of a version's `WeightManifest`.

    Each encoding starts at a multiple of ALIGNMENT bytes. The parts are pickled once, however many replicas get the bucket,
    with this version and with later ones.
    """

    place: ray.ObjectRef[Any] | FilePlace
    """The object in Ray's object store, or the place in a file, that contains the bytes."""
    parts: tuple[EncodedPart, ...]

    def __reduce__(self) -> tuple[Callable[[Any, bytes], WeightBucket], tuple[Any, bytes]]:
        return _unpickled_bucket, (self.place, self._pickled_parts)  # Ray has to see the references in a message

    @cached_property
    def _pickled_parts(self) -> bytes:
        return pickle.dumps(self.parts, pickle.HIGHEST_PROTOCOL)


def _unpickled_bucket(place: ray.ObjectRef[Any] | FilePlace, parts: bytes) -> WeightBucket:
    return WeightBucket(place, pickle.loads(parts))  # noqa: S301  # as the message that contains it


@dataclass(frozen=True)
class VersionStep:
    """Buckets that contain all bytes of one version, or only the changes since the version `base`."""

    version: int
    base: int | None
    """The version that a replica must have to decode the buckets. None: the buckets contain the whole version."""
    buckets: tuple[WeightBucket, ...]


@dataclass(frozen=True)
class VersionBuckets:
    """A version as buckets that replicas fetch one after another."""

    steps: tuple[VersionStep, ...]
    """A step with a whole version, then one step with the changes of each later version up to the published one."""
    changes_follow: bool
    """Whether a later version may be published as changes to this one.

    If so, replicas keep the bytes of this version.
    """


@dataclass(frozen=True)
class StoredBuckets(VersionBuckets):
    """A version in Ray's object store.

    Ray keeps the buckets as long as this object exists and the ranks that stored them are alive.
    """


@dataclass(frozen=True)
class FolderBuckets(VersionBuckets):
    """A version in the files of a folder. The files remain when the processes that wrote them have ended."""

    folder: Path
    number: int
    """Number of the publication in the folder (`publication_folder`)."""


@dataclass(frozen=True)
class RegisteredShard:
    """The shard of one train rank in registered memory: consecutive parts, each starting at a multiple of ALIGNMENT bytes."""

    memory: RemoteMemory
    parts: int
    """Number of parts of the manifest in the shard."""


@dataclass(frozen=True)
class RegisteredShards:
    """A version in registered memory of the train ranks. The shards are in the order of the manifest's parts."""

    shards: tuple[RegisteredShard, ...]


@dataclass(frozen=True)
class RegisteredCopy:
    """A version in registered memory of one replica, at the offsets of the version's layout."""

    memory: RemoteMemory


type WeightSource = SegmentHandle | StoredBuckets | FolderBuckets | RegisteredShards | RegisteredCopy


@dataclass(frozen=True)
class StagedShard:
    """The shard that a train rank has staged for a publication: its parts of the tensors, and where their bytes are."""

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
    probe: Probe | None = None
    """Tokens and the trainer's log-probs of them, which replicas compare with their own log-probs.

    None: the run has no probe, or the trainer has not computed the probe of this version yet.
    """


def joined(shards: Sequence[StagedShard], version: int) -> PublishedWeights:
    """Return the published version that consists of the staged shards of all train ranks.

    shards: in the order of ranks. Raises WeightsDamaged if ranks disagree about names, shapes or types, or if a tensor
    is incomplete or was written twice.
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
    if isinstance(sources[0], RegisteredShards):
        registered = [source for source in sources if isinstance(source, RegisteredShards)]
        return RegisteredShards(tuple(shard for source in registered for shard in source.shards))
    stored = [source for source in sources if isinstance(source, StoredBuckets | FolderBuckets)]
    steps = zip(*(source.steps for source in stored), strict=True)
    return replace(stored[0], steps=tuple(_joined_steps(of_ranks) for of_ranks in steps))


def _joined_steps(steps: Sequence[VersionStep]) -> VersionStep:
    return replace(steps[0], buckets=tuple(bucket for step in steps for bucket in step.buckets))
