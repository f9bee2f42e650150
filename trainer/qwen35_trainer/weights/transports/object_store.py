"""A version in Ray's object store: for several hosts, and for machines without shared memory segments.

    each rank: shards ─► a bucket ─► ray.put ─► the next bucket …      the whole model is nowhere but in the stores of the ranks' nodes
    replica:   one bucket at a time ─► verified ─► its place in the replica's own memory ─► released

waits on                   unblocked by                       deadline
a bucket                   Ray has fetched it                 publication.timeoutSeconds, in the driver

A replica reads at its own pace: a late one needs nothing else. Ray keeps the buckets while the driver holds their references and the
rank that put them lives: since 2.56, `ray.put` cannot give an object to another owner. A run ends with a lost rank in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import ray

from qwen35_trainer.weights import segment
from qwen35_trainer.weights.host_weights import HostWeights, is_intact, raise_if_damaged
from qwen35_trainer.weights.published import PublishedWeights, StagedShard, StoredBucket, StoredBuckets
from qwen35_trainer.weights.segment import Memory, MemorySegment, SegmentPool
from qwen35_trainer.weights.staging import ShardPiece, WeightShard, layout_of, pieces
from qwen35_trainer.weights.transports import RankContext
from qwen35_trainer.weights.weight_manifest import ALIGNMENT, TensorPart, WeightManifest, WeightsDamaged, packed

BUCKET_BYTES = 256 * 2**20
"""Maximum size of a bucket. A rank and a replica hold one at a time."""


class ObjectStoreSender:
    """One rank's end: puts its own shards into the object store."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def stage(self, shards: Sequence[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        layout = layout_of(shards)
        parts: list[TensorPart] = []
        buckets: list[StoredBucket] = []
        memory = np.zeros(BUCKET_BYTES, dtype=np.uint8)  # pages that are not written to cost nothing
        for contents in _filled(shards):
            places = list(packed([piece.size for piece in contents]))
            parts += [piece.write(memory[place]) for piece, place in zip(contents, places, strict=True)]
            reference = ray.put(memory[: places[-1].stop])
            buckets.append(StoredBucket(reference, len(contents)))
        first = layout if self._context.rank == 0 else None
        return StagedShard(first, layout.checksum, tuple(parts), StoredBuckets(tuple(buckets)))


class ObjectStoreReceiver:
    """A replica's end: collects the buckets in memory of its own, which it uses again for later versions."""

    def __init__(self) -> None:
        self._pool = SegmentPool()

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        assert isinstance(published.source, StoredBuckets)
        manifest = published.manifest
        manifest.check_complete()
        place = self._place(manifest)
        memory = np.empty(manifest.layout.size, np.uint8) if place is None else place.data
        damaged, first = set[int](), 0
        for bucket in published.source.buckets:
            parts = manifest.parts[first : first + bucket.parts]
            data: Memory = await bucket.reference
            damaged |= await asyncio.to_thread(_unpack, manifest, parts, data, memory)
            first += bucket.parts
            del data  # so that Ray can free it before the next bucket arrives
        raise_if_damaged(manifest, damaged)
        if first != len(manifest.parts):
            raise WeightsDamaged(
                f"weights of version {manifest.version}: the buckets hold {first} of {len(manifest.parts)} parts"
            )
        if place is None:
            return HostWeights(manifest, memory)
        place.unlock()
        return HostWeights.of(manifest, place)

    def _place(self, manifest: WeightManifest) -> MemorySegment | None:
        """Return memory for a version; None where this system has no segments."""
        return self._pool.claim(manifest.version, manifest.layout.size) if segment.IS_SUPPORTED else None


def _filled(shards: Sequence[WeightShard]) -> Iterator[list[ShardPiece]]:
    """Yield the pieces of each bucket."""
    contents: list[ShardPiece] = []
    filled = 0
    for piece in pieces(shards):
        if contents and filled + piece.size > BUCKET_BYTES:
            yield contents
            contents, filled = [], 0
        contents.append(piece)
        filled = -(-(filled + piece.size) // ALIGNMENT) * ALIGNMENT
    if contents:
        yield contents


def _unpack(manifest: WeightManifest, parts: Sequence[TensorPart], data: Memory, memory: Memory) -> set[int]:
    """Copy the parts of a bucket to their places. Returns the numbers of damaged tensors."""
    damaged = set[int]()
    for part, place in zip(parts, packed([part.size for part in parts]), strict=True):
        begin = manifest.layout.tensors[part.tensor].offset + part.start
        memory[begin : begin + part.size] = 0 if place.stop > data.size else data[place]
        if not is_intact(part, memory[begin : begin + part.size]):
            damaged.add(part.tensor)
    return damaged
