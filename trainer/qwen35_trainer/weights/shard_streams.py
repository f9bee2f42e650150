"""A rank's shard as a stream of buckets, whole or as changes, and a replica's memory, which the streams of all ranks fill.

    rank:    shards ─► converted ─► encoded ─► a bucket ─► put where replicas can fetch it ─► the next bucket …
    replica: its memory ◄─ decoded, verified ◄─ one bucket at a time, of all ranks

    version         4       5        6        7        8            whole_every = 3
    buckets       whole  changes  changes   whole   changes
    to get version 6, a replica that has version 5 fetches the changes of 6; any other replica fetches 4, 5 and 6

The transports define how a bucket is put and fetched; everything else of a stream is here. If changes are published,
each rank keeps the bytes of its shard of the previous version in host memory, and each replica keeps all bytes of the version
that it fetched last.

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


@dataclass(frozen=True)
class StagedStream:
    """One rank's encoded shards of a version: the parts, and the buckets from which replicas decode them.

    A version that is published as changes also needs the buckets of the last whole version and of all versions since.
    """

    layout: WeightLayout
    parts: tuple[TensorPart, ...]
    steps: tuple[VersionStep, ...]


class ShardStream:
    """Encodes one rank's shards of one version after another into buckets, whole or as changes."""

    def __init__(self, whole_every: int, bucket_bytes: int) -> None:
        """Create a stream.

        whole_every: every `whole_every`-th version is whole. With 1, all versions are whole, and the stream keeps no
        version in memory. bucket_bytes: maximum size of a bucket, at least that of a part. A rank and a replica each
        have one bucket at a time in memory.
        """
        self._whole_every, self._bucket_bytes = whole_every, bucket_bytes
        self._layout: WeightLayout | None = None
        self._before: list[Memory] = []  # the bytes of each of this rank's parts in the version before
        self._steps: tuple[VersionStep, ...] = ()

    def stage(
        self, shards: Sequence[WeightShard], version: int, put: Callable[[Memory], ray.ObjectRef[Any] | FilePlace]
    ) -> StagedStream:
        """Encode the shards of a version into buckets, and store each bucket.

        put: stores the bytes of a bucket, and returns where they are. It must copy the bytes before it returns, because
        their memory is used again. If all ranks make the same calls, they encode the same versions as changes.
        """
        layout = layout_of(shards)
        earlier = self._steps if len(self._steps) < self._whole_every and layout == self._layout else ()
        self._layout, self._steps = layout, ()  # after an error, the next version is whole
        parts, buckets = self._put_buckets(list(pieces(shards)), put, as_changes=bool(earlier))
        self._steps = (*earlier, VersionStep(version, earlier[-1].version if earlier else None, buckets))
        return StagedStream(layout, parts, self._steps)

    def forget(self) -> None:
        """Make sure that the next version is whole. Call this if replicas cannot fetch the last version."""
        self._steps = ()

    @property
    def changes_follow(self) -> bool:
        """Whether later versions may be encoded as changes."""
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
        # A larger bucket would never be full, and Linux refuses an allocation that is larger than the machine's memory.
        writer = _BucketWriter(put, min(self._bucket_bytes, sum(_aligned(piece.size) for piece in contents)))
        for number, piece in enumerate(contents):
            room = writer.room(piece.size)
            parts.append(piece.write(room))
            before = self._before[number] if self.changes_follow else None
            writer.add(_encoded(room, before, piece.dtype.itemsize, as_changes=as_changes))
        return tuple(parts), writer.close()


class _BucketWriter:
    """Collects encodings in a bucket, and stores the bucket when the next encoding might not fit."""

    def __init__(self, put: Callable[[Memory], ray.ObjectRef[Any] | FilePlace], size: int) -> None:
        self._put = put
        self._memory = np.zeros(size, dtype=np.uint8)  # pages that are not written to cost nothing
        self._next = self._end = 0
        self._parts: list[EncodedPart] = []
        self._buckets: list[WeightBucket] = []

    def room(self, size: int) -> Memory:
        """Return `size` bytes of memory for the next encoding, which may be shorter.

        If they do not fit into the present bucket, that bucket is stored first.
        """
        if self._parts and self._next + size > self._memory.size:
            self._put_bucket()
        return self._memory[self._next : self._next + size]

    def add(self, part: EncodedPart) -> None:
        """Add an encoding to the bucket.

        part: the encoding that was written to the memory from the last call of `room`.
        """
        self._parts.append(part)
        self._end = self._next + part.size
        self._next = _aligned(self._end)

    def close(self) -> tuple[WeightBucket, ...]:
        """Store the last bucket, and return all buckets."""
        if self._parts:
            self._put_bucket()
        return tuple(self._buckets)

    def _put_bucket(self) -> None:
        self._buckets.append(WeightBucket(self._put(self._memory[: self._end]), tuple(self._parts)))
        self._parts, self._next, self._end = [], 0, 0


class StreamReceiver:
    """The receiving end of shard streams on a replica: decodes buckets into memory that later versions use again."""

    def __init__(self, read: Callable[[VersionBuckets, WeightBucket], Awaitable[Memory]]) -> None:
        """Create a receiver. read: returns the bytes of a bucket of a version."""
        self._read = read
        self._pool = SegmentPool()
        self._before: HostWeights | None = None  # the version to which changes may be applied
        self._fetching = asyncio.Lock()  # one fetch at a time: a cancelled one may still write to the memory

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        """Fetch a version and verify its checksums.

        If the changes since the version that was fetched last are published, only these changes are fetched. Raises
        WeightsDamaged, naming the damaged tensors, and TooLittleMemory if a copy of the weights does not fit into
        memory. After an error, the version that was fetched last is unchanged.
        """
        async with self._fetching:
            return await self._fetch(published)

    async def _fetch(self, published: PublishedWeights) -> HostWeights:
        manifest, source = published.manifest, published.source
        assert isinstance(source, VersionBuckets)
        await asyncio.to_thread(_check, manifest, source)  # hundreds of thousands of parts, for the largest models
        place = self._pool.claim(manifest.version, manifest.layout.size) if segment.IS_SUPPORTED else None
        memory = np.empty(manifest.layout.size, np.uint8) if place is None else place.data
        damaged = set[int]()
        # In a thread, because it may copy hundreds of gigabytes, and this process must answer calls meanwhile.
        steps = await _to_its_end(self._missing_steps, manifest, source.steps, memory)
        for step in steps:
            damaged, first = set[int](), 0  # those of earlier steps do not count: the last one verifies every part
            for bucket in step.buckets:
                parts = manifest.parts[first : first + len(bucket.parts)]
                data = await self._read(source, bucket)
                damaged |= await _to_its_end(_decode, manifest, parts, bucket.parts, data, memory)
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
        """Return the steps that the replica must fetch.

        If one of the steps is based on the version that was fetched last, copy that version to `memory`, and return the
        steps from this one on. Otherwise return all steps, of which the first is whole.
        """
        before = self._before
        if before is not None and before.manifest.layout == manifest.layout:
            for number, step in enumerate(steps):
                if step.base == before.version:
                    before.copy_to(memory)
                    return steps[number:]
        return steps


async def _to_its_end[**P, R](call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Run a call that writes to the memory of a version in a thread.

    If the caller is cancelled, wait for the end of the call, which nothing can stop, before the cancellation continues. A
    later fetch may use the same memory.
    """
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments, **options))
    try:
        return await asyncio.shield(running)
    finally:
        if not running.done():
            await asyncio.wait([running])


def _encoded(room: Memory, before: Memory | None, item_bytes: int, *, as_changes: bool) -> EncodedPart:
    """Replace the bytes of a part in `room` by its encoded changes, if these are wanted and smaller.

    before: bytes of the part in the version before, which are overwritten with the new bytes; None: earlier versions
    are not kept. item_bytes: size of a value in bytes. as_changes: whether changes are wanted. Returns the size and
    kind of the encoding in `room`.
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


def _check(manifest: WeightManifest, source: VersionBuckets) -> None:
    """Raise WeightsDamaged if the manifest is not complete, or the buckets of a step do not contain as many parts as it."""
    manifest.check_complete()
    for step in source.steps:
        if (held := sum(len(bucket.parts) for bucket in step.buckets)) != len(manifest.parts):
            raise WeightsDamaged(
                f"weights of version {manifest.version}: the buckets of version {step.version} hold {held} of "
                f"{len(manifest.parts)} parts"
            )


def _decode(
    manifest: WeightManifest, parts: Sequence[TensorPart], encoded: Sequence[EncodedPart], data: Memory, memory: Memory
) -> set[int]:
    """Decode the parts of a bucket to their offsets in `memory`, and verify each of them.

    parts: the parts of the manifest in the bucket. encoded: size and kind of each part's encoding. data: bytes of the
    bucket. memory: bytes of the whole version. Returns the indices, in the layout, of the tensors with a part that
    cannot be decoded or does not match its checksum.
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
    """Decode the encoding of a part into `target`. Returns False if the encoding does not fit, because it is damaged.

    target: memory of the part. If the encoding contains changes, `target` must hold the part's bytes of the previous
    version. contents: bytes of the encoding. item_bytes: size of a value in bytes. The checksum of the part is not
    verified.
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
