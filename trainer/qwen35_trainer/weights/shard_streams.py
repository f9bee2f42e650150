"""A rank's shard as a stream of buckets, whole or as changes, and a replica's memory, which the streams of all ranks fill.

    rank:    shards ─► converted ─► encoded ─► a bucket ─► put where replicas can fetch it ─► the next bucket …
    replica: its memory ◄─ decoded, verified ◄─ one bucket at a time, of all ranks

    version         4       5        6        7        8            whole_every = 3
    buckets       whole  changes  changes   whole   changes
    to get version 6, a replica that has version 5 fetches the changes of 6; any other replica fetches 4, 5 and 6

The transports define how a bucket is put and fetched; everything else of a stream is here. With changes, a rank keeps
the bytes of its shard in the version before in host memory, and a replica keeps the bytes of the whole version.

waits on                   unblocked by                       deadline
a bucket                   the transport has fetched it       publication.timeoutSeconds, in the driver
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qwen35_trainer.weights import segment
from qwen35_trainer.weights.changed_values import ChangesDamaged, apply_changes, encoded_changes
from qwen35_trainer.weights.host_weights import HostWeights, is_intact, raise_if_damaged
from qwen35_trainer.weights.published import (
    EncodedPart,
    FilePlace,
    PublishedWeights,
    VersionBuckets,
    VersionStep,
    WeightBucket,
)
from qwen35_trainer.weights.segment import Memory, SegmentPool
from qwen35_trainer.weights.staging import ShardPiece, WeightShard, layout_of, pieces
from qwen35_trainer.weights.weight_manifest import (
    ALIGNMENT,
    ITEM_BYTES,
    TensorPart,
    WeightLayout,
    WeightManifest,
    WeightsDamaged,
)

if TYPE_CHECKING:
    from typing import Any

    import ray

BUCKET_BYTES = 256 * 2**20
"""Maximum size of a bucket. A rank and a replica hold one at a time."""


@dataclass(frozen=True)
class StagedStream:
    """One rank's part of a version: its parts of the tensors, and the steps from the last whole version to this one."""

    layout: WeightLayout
    parts: tuple[TensorPart, ...]
    steps: tuple[VersionStep, ...]


class ShardStream:
    """Encodes one rank's shards of one version after another, whole or as changes."""

    def __init__(self, whole_every: int) -> None:
        """Create a stream.

        whole_every: every `whole_every`-th version is whole. With 1 all versions are whole, and no version is kept in
        memory.
        """
        self._whole_every = whole_every
        self._layout: WeightLayout | None = None
        self._before: list[Memory] = []  # the bytes of each of this rank's parts in the version before
        self._steps: tuple[VersionStep, ...] = ()

    def stage(
        self, shards: Sequence[WeightShard], version: int, put: Callable[[Memory], ray.ObjectRef[Any] | FilePlace]
    ) -> StagedStream:
        """Encode the shards of a version, and put each bucket.

        put: stores the bytes of a bucket, and returns where they are. It must have copied the bytes when it returns,
        because their memory is used again. If all ranks make the same calls, their streams have the same steps.
        """
        layout = layout_of(shards)
        earlier = self._steps if len(self._steps) < self._whole_every and layout == self._layout else ()
        self._layout, self._steps = layout, ()  # after an error, the next version is whole
        parts, buckets = self._put_buckets(list(pieces(shards)), put, as_changes=bool(earlier))
        self._steps = (*earlier, VersionStep(version, earlier[-1].version if earlier else None, buckets))
        return StagedStream(layout, parts, self._steps)

    def forget(self) -> None:
        """Encode the next version whole, because replicas cannot fetch the last one."""
        self._steps = ()

    @property
    def changes_follow(self) -> bool:
        """Whether some later versions may be encoded as changes."""
        return self._whole_every > 1

    def _put_buckets(
        self,
        contents: Sequence[ShardPiece],
        put: Callable[[Memory], ray.ObjectRef[Any] | FilePlace],
        *,
        as_changes: bool,
    ) -> tuple[tuple[TensorPart, ...], tuple[WeightBucket, ...]]:
        if self.changes_follow and not as_changes:
            self._before = [np.zeros(piece.size, np.uint8) for piece in contents]
        parts: list[TensorPart] = []
        writer = _BucketWriter(put)
        for number, piece in enumerate(contents):
            room = writer.room(piece.size)
            parts.append(piece.write(room))
            before = self._before[number] if self.changes_follow else None
            writer.add(_encoded(room, before, piece.dtype.itemsize, as_changes=as_changes))
        return tuple(parts), writer.close()


class _BucketWriter:
    """Collects encodings in a bucket, and puts the bucket when the next encoding might not fit."""

    def __init__(self, put: Callable[[Memory], ray.ObjectRef[Any] | FilePlace]) -> None:
        self._put = put
        self._memory = np.zeros(BUCKET_BYTES, dtype=np.uint8)  # pages that are not written to cost nothing
        self._next = self._end = 0
        self._parts: list[EncodedPart] = []
        self._buckets: list[WeightBucket] = []

    def room(self, size: int) -> Memory:
        """Return the memory for the next encoding, of at most `size` bytes."""
        if self._parts and self._next + size > BUCKET_BYTES:
            self._put_bucket()
        return self._memory[self._next : self._next + size]

    def add(self, part: EncodedPart) -> None:
        """Add the encoding that was written to the memory from the last call of `room`."""
        self._parts.append(part)
        self._end = self._next + part.size
        self._next = _aligned(self._end)

    def close(self) -> tuple[WeightBucket, ...]:
        """Put the last bucket. Returns all buckets."""
        if self._parts:
            self._put_bucket()
        return tuple(self._buckets)

    def _put_bucket(self) -> None:
        self._buckets.append(WeightBucket(self._put(self._memory[: self._end]), tuple(self._parts)))
        self._parts, self._next, self._end = [], 0, 0


class StreamReceiver:
    """The receiving end on a replica: collects the buckets in memory that it uses again for later versions."""

    def __init__(self, read: Callable[[VersionBuckets, WeightBucket], Awaitable[Memory]]) -> None:
        """Create a receiver. read: fetches the bytes of a bucket of a version."""
        self._read = read
        self._pool = SegmentPool()
        self._before: HostWeights | None = None  # the version to which changes may be applied

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        """Fetch a version and verify it.

        If the changes since the version that the replica has are published, only these are fetched. Raises
        WeightsDamaged naming the tensors that are damaged. The earlier version is unchanged in this case.
        """
        manifest, source = published.manifest, published.source
        assert isinstance(source, VersionBuckets)
        manifest.check_complete()
        _check_parts(manifest, source)
        place = self._pool.claim(manifest.version, manifest.layout.size) if segment.IS_SUPPORTED else None
        memory = np.empty(manifest.layout.size, np.uint8) if place is None else place.data
        damaged = set[int]()
        for step in self._missing_steps(manifest, source.steps, memory):
            damaged, first = set[int](), 0  # those of earlier steps do not count: the last one verifies every part
            for bucket in step.buckets:
                parts = manifest.parts[first : first + len(bucket.parts)]
                data = await self._read(source, bucket)
                damaged |= await asyncio.to_thread(_decode, manifest, parts, bucket.parts, data, memory)
                first += len(bucket.parts)
                del data  # so that it can be freed before the next bucket arrives
        raise_if_damaged(manifest, damaged)
        if place is not None:
            place.unlock()
        weights = HostWeights(manifest, memory) if place is None else HostWeights.of(manifest, place)
        self._before = weights if source.changes_follow else None
        return weights

    def _missing_steps(
        self, manifest: WeightManifest, steps: tuple[VersionStep, ...], memory: Memory
    ) -> tuple[VersionStep, ...]:
        """Return the steps to fetch.

        If the replica has the version that one of the steps changes, copy it to `memory`, and return the steps from
        that one on. Otherwise return all steps, of which the first is whole.
        """
        before = self._before
        if before is not None and before.manifest.layout == manifest.layout:
            for number, step in enumerate(steps):
                if step.base == before.version:
                    before.copy_to(memory)
                    return steps[number:]
        return steps


def _encoded(room: Memory, before: Memory | None, item_bytes: int, *, as_changes: bool) -> EncodedPart:
    """Replace the bytes of a part in `room` by their changes since `before`, if `as_changes` and these are smaller.

    before: bytes of the part in the version before, which are then overwritten with the new bytes; None: no version is
    kept. item_bytes: number of bytes of each value. Returns what `room` contains.
    """
    if before is None:
        return EncodedPart(room.size, None)
    encoding = encoded_changes(before, room, item_bytes) if as_changes else None
    before[:] = room
    if encoding is None:
        return EncodedPart(room.size, None)
    changed, number = encoding
    room[: changed.size] = changed
    return EncodedPart(changed.size, number)


def _check_parts(manifest: WeightManifest, source: VersionBuckets) -> None:
    """Raise WeightsDamaged unless the buckets of each step contain as many parts as the manifest."""
    for step in source.steps:
        if (held := sum(len(bucket.parts) for bucket in step.buckets)) != len(manifest.parts):
            raise WeightsDamaged(
                f"weights of version {manifest.version}: the buckets of version {step.version} hold {held} of "
                f"{len(manifest.parts)} parts"
            )


def _decode(
    manifest: WeightManifest, parts: Sequence[TensorPart], encoded: Sequence[EncodedPart], data: Memory, memory: Memory
) -> set[int]:
    """Write the parts of a bucket to their offsets in `memory`.

    Returns the numbers of the tensors that do not match the manifest. data: bytes of the bucket. encoded: the encoding
    of each part.
    """
    damaged = set[int]()
    start = 0
    for part, encoding in zip(parts, encoded, strict=True):
        entry = manifest.layout.tensors[part.tensor]
        target = memory[entry.offset + part.start : entry.offset + part.start + part.size]
        contents = data[start : start + encoding.size]
        if not (is_decoded(target, contents, encoding, ITEM_BYTES[entry.dtype]) and is_intact(part, target)):
            damaged.add(part.tensor)
        start = _aligned(start + encoding.size)
    return damaged


def is_decoded(target: Memory, contents: Memory, encoding: EncodedPart, item_bytes: int) -> bool:
    """Decode an encoding into `target`, the bytes of its part. Returns False if it does not fit, because it is damaged.

    contents: bytes of the encoding. item_bytes: number of bytes of each value.
    """
    if contents.size != encoding.size:
        return False
    if encoding.changes is None:
        if contents.size != target.size:
            return False
        target[:] = contents
        return True
    try:
        apply_changes(target, contents, encoding.changes, item_bytes)
    except ChangesDamaged:
        return False
    return True


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
