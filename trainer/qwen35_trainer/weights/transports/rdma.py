"""A version in registered memory: for pools on several hosts with RDMA between them.

    each rank: its shard, in the published type ─► one of two registered segments         no train rank holds the whole model
    replica:   one-sided reads of all shards ─► a registered segment of its own ─► every part verified ─► HostWeights
               the next parts are read while others are verified, on several cores
    others:    one-sided reads of that segment, at least until the replica begins its second fetch after this one

waits on                  unblocked by                               deadline
a read                    its bytes have arrived, or its source ends READ_SECONDS, then SourceLost
an earlier fetch          its last read has ended, or is given up    READ_SECONDS

A rank does nothing while replicas read, so each replica reads at its own pace. A segment is written again when the
driver does not need its version any more. The driver does not wait for a lost replica: if such a replica still reads
from the segment, the checksums of the read bytes fail. A reader that is killed leaves nothing behind on a rank.

A read that was given up may still write (transfer_agent.py). Its memory is used again only after it has ended.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from qwen35_trainer.weights.host_weights import HostWeights, is_intact, raise_if_damaged, verifiers
from qwen35_trainer.weights.published import (
    PublishedWeights,
    RegisteredCopy,
    RegisteredShard,
    RegisteredShards,
    StagedShard,
)
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.staging import STAGING_THREADS, WeightShard, layout_of, pieces, plan_of, write_pieces
from qwen35_trainer.weights.transfer_agent import PendingRead, SourceLost, TransferAgent
from qwen35_trainer.weights.transports import RankContext
from qwen35_trainer.weights.transports.read_requests import ReadRequest, read_requests
from qwen35_trainer.weights.transports.registered_segments import RegisteredSegment, RegisteredSegments
from qwen35_trainer.weights.weight_manifest import WeightManifest, packed

READ_SECONDS = 60.0
"""Maximum duration of one read, in seconds. A read is of 64 MiB at most, or of one larger part.

A read of 64 MiB needs 1.1 MB/s to finish in this time, which is a hundredth of the rate of a slow network.
"""
MAX_READS = 4
"""Maximum number of reads that a replica has in flight. Reads from different ranks share the replica's bandwidth."""
POLL_SECONDS = 0.0005


class RdmaSender:
    """The sending end of the transport RDMA on one train rank: it writes the rank's shard to registered memory."""

    def __init__(self, context: RankContext, agent: TransferAgent) -> None:
        self._context = context
        self._threads = ThreadPoolExecutor(STAGING_THREADS, "staging")
        self._segments = RegisteredSegments(agent)

    def stage(self, shards: Sequence[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        plan = plan_of(shards, self._context.replica)
        layout, contents = layout_of(shards, plan), list(pieces(shards, plan=plan))
        first = layout if self._context.rank == 0 else None
        if not contents:
            return StagedShard(first, layout.checksum, (), RegisteredShards(()))
        places = list(packed([piece.size for piece in contents]))
        claimed = self._segments.claim(version, places[-1].stop, needed)
        memory = claimed.segment.data
        parts = write_pieces(zip(contents, (memory[place] for place in places), strict=True), self._threads)
        claimed.segment.unlock()
        shard = RegisteredShard(claimed.remote, len(parts))
        return StagedShard(first, layout.checksum, parts, RegisteredShards((shard,)))


@dataclass(frozen=True)
class _Reading:
    """A read that is in flight. ends: time on the monotonic clock, in seconds, at which the read is given up."""

    request: ReadRequest
    read: PendingRead
    ends: float


@dataclass(frozen=True)
class _GivenUp:
    """The reads of a failed fetch that were given up and may still write to its segment.

    memory: a reference that keeps the segment from being claimed; None: the segment could not be locked.
    """

    reads: tuple[PendingRead, ...]
    memory: Memory | None


class RdmaReceiver:
    """The receiving end of the transport RDMA on a replica: it reads into memory that it uses again for later versions.

    One version is fetched at a time, on a thread of this object. A fetch that is cancelled gives up its reads, and its
    segment is not used again before these reads have ended.
    """

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._first = zlib.crc32(agent.name.encode())  # the rank to begin with, another one for each replica
        self._segments = RegisteredSegments(agent)
        self._thread = ThreadPoolExecutor(1, "weights")
        self._verifiers = ThreadPoolExecutor(verifiers(os.cpu_count() or 1), "verify")
        self._given_up: list[_GivenUp] = []
        self._copy: tuple[HostWeights, RegisteredCopy] | None = None

    @property
    def copy(self) -> RegisteredCopy | None:
        """The memory in which other replicas can read the version that was fetched last.

        None: no version was fetched.
        """
        return None if self._copy is None else self._copy[1]

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        abandoned = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._fetch, published, abandoned)
        finally:
            abandoned.set()

    def _fetch(self, published: PublishedWeights, abandoned: threading.Event) -> HostWeights:
        manifest, source = published.manifest, published.source
        assert isinstance(source, RegisteredShards | RegisteredCopy)
        manifest.check_complete()
        requests = read_requests(manifest, source, self._first)
        self._given_up = [each for each in self._given_up if not all(map(_has_ended, each.reads))]
        claimed = self._segments.claim(manifest.version, manifest.layout.size)
        reading: list[_Reading] = []
        try:
            raise_if_damaged(manifest, self._read(manifest, requests, claimed, reading, abandoned))
        except BaseException as error:
            claimed.segment.unlock()
            if reading:
                self._given_up.append(_GivenUp(tuple(each.read for each in reading), claimed.segment.read()))
            if isinstance(error, SourceLost):
                raise SourceLost(f"weights of version {manifest.version}: {error}") from error
            raise
        claimed.segment.unlock()
        weights = HostWeights.of(manifest, claimed.segment)
        self._copy = weights, RegisteredCopy(claimed.remote)  # the tensors keep the memory from being claimed
        return weights

    def _read(
        self,
        manifest: WeightManifest,
        requests: Sequence[ReadRequest],
        claimed: RegisteredSegment,
        reading: list[_Reading],
        abandoned: threading.Event,
    ) -> set[int]:
        """Read and verify all parts. Returns the indices, in the layout, of the damaged tensors.

        reading: an empty list, to which reads are added while they are in flight; after an error, it contains the reads
        that have not ended. abandoned: set when the fetch is cancelled. Raises SourceLost if a source cannot be read,
        or if the fetch was cancelled.
        """
        memory, waiting, checks = claimed.segment.data, deque(requests), list[Future[set[int]]]()
        while waiting or reading:
            if abandoned.is_set():
                raise SourceLost("the fetch was given up")
            while waiting and len(reading) < MAX_READS:
                request = waiting.popleft()
                read = self._agent.start_read(request.source, memory, request.spans)
                reading.append(_Reading(request, read, time.monotonic() + READ_SECONDS))
            done = [each for each in reading if _done(each)]
            if not done:
                time.sleep(POLL_SECONDS)
            for each in done:
                reading.remove(each)
                checks.append(self._verifiers.submit(_damaged, manifest, each.request, memory))
        return set[int]().union(*(check.result() for check in checks))


def _done(reading: _Reading) -> bool:
    """Return whether all bytes of a read have arrived.

    Raises SourceLost if the read has failed, or after its deadline.
    """
    if reading.read.is_done():
        return True
    if time.monotonic() >= reading.ends:
        raise SourceLost(f"agent {reading.request.source.agent} did not deliver within {READ_SECONDS:g} s")
    return False


def _has_ended(read: PendingRead) -> bool:
    """Return whether a read that was given up cannot write any more."""
    try:
        return read.is_done()
    except SourceLost:
        return True


def _damaged(manifest: WeightManifest, request: ReadRequest, memory: Memory) -> set[int]:
    """Return the indices, in the layout, of the tensors with a part of the request that does not match its checksum."""
    damaged = set[int]()
    for part in request.parts:
        begin = manifest.layout.tensors[part.tensor].offset + part.start
        if not is_intact(part, memory[begin : begin + part.size]):
            damaged.add(part.tensor)
    return damaged
