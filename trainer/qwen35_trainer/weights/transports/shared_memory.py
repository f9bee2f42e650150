"""A version in shared memory: for trainer and replicas on one host.

    rank 0: claims a segment ──its handle, to all ranks──► each rank writes its shards to their place ──► all have written
                                                                                                              │
    replica: maps the segment, verifies the checksums, computes with it, or copies it to its device  ◄────────┘

waits on                   unblocked by                                deadline
the handle, the barrier    rank 0; all ranks have written              that of the process group
a segment                  no wait: if none is free, one is created    none

The segment contains whole tensors, although no rank has gathered them. Two segments take turns (`SegmentPool`). A segment
is written again only when the driver does not need its version any more and no process holds a tensor of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from qwen35_trainer.weights.host_weights import HostWeights, verifiers
from qwen35_trainer.weights.published import PublishedWeights, StagedShard
from qwen35_trainer.weights.segment import MappedSegments, MemorySegment, SegmentHandle, SegmentPool
from qwen35_trainer.weights.staging import STAGING_THREADS, WeightShard, layout_of, pieces, plan_of, write_pieces
from qwen35_trainer.weights.transports import RankContext
from qwen35_trainer.weights.weight_manifest import WeightLayout

THREADS_FROM_BYTES = 2**30
"""Minimum size, in bytes, of a version that is verified on several threads.

One thread verifies a smaller version in at most 0.1 s.
"""


class SharedMemorySender:
    """The sending end of the transport SharedMemory on one train rank: it writes the rank's shards to a shared segment."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._pool = SegmentPool()  # on rank 0
        self._threads = ThreadPoolExecutor(STAGING_THREADS, "staging")
        self._opened: dict[str, MemorySegment] = {}  # on other ranks, by name

    def stage(self, shards: Sequence[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        plan = plan_of(shards, self._context.replica)
        layout = layout_of(shards, plan)
        segment = self._segment(version, layout, needed)
        contents = []
        for piece in pieces(shards, plan=plan):
            begin = layout.tensors[piece.tensor].offset + piece.start
            contents.append((piece, segment.data[begin : begin + piece.size]))
        parts = write_pieces(contents, self._threads)
        if self._context.group is not None:
            dist.barrier(self._context.group)
        if self._context.rank == 0:
            segment.unlock()
        return StagedShard(layout if self._context.rank == 0 else None, layout.checksum, parts, segment.handle)

    def _segment(self, version: int, layout: WeightLayout, needed: frozenset[int]) -> MemorySegment:
        """Return the segment to which all ranks write `version`.

        Rank 0 claims and locks it. All ranks must call this together. needed: versions whose segments must not
        be overwritten.
        """
        rank, group = self._context.rank, self._context.group
        claimed = self._pool.claim(version, layout.size, needed) if rank == 0 else None
        if group is None:
            assert claimed is not None, "only one rank has no group"
            return claimed
        message: list[Any] = [None if claimed is None else (claimed.handle, self._pool.handles)]
        dist.broadcast_object_list(message, src=0, group=group)
        return claimed if claimed is not None else self._open(*message[0])

    def _open(self, handle: SegmentHandle, all_handles: Sequence[SegmentHandle]) -> MemorySegment:
        """Return the segment of `handle`, opened for writing on this rank.

        Segments that are not in `all_handles` are closed, because rank 0 has closed them.
        """
        alive = {each.name for each in all_handles}
        self._opened = {name: segment for name, segment in self._opened.items() if name in alive}
        if handle.name not in self._opened:
            self._opened[handle.name] = MemorySegment.open(handle, writable=True)
        return self._opened[handle.name]


class SharedMemoryReceiver:
    """The receiving end of the transport SharedMemory on a replica: it maps segments, and verifies versions.

    Each segment is mapped once. A large version is verified on several threads.
    """

    def __init__(self) -> None:
        self._segments = MappedSegments()
        self._verifiers = ThreadPoolExecutor(verifiers(os.cpu_count() or 1), "verify")

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        return await asyncio.to_thread(self._fetch, published)

    def _fetch(self, published: PublishedWeights) -> HostWeights:
        assert isinstance(published.source, SegmentHandle)
        weights = HostWeights.of(published.manifest, self._segments.open(published.source))
        # A thread that starts without memory is waited for without end, so a small version needs none.
        weights.verify(self._verifiers if published.manifest.layout.size >= THREADS_FROM_BYTES else None)
        return weights
