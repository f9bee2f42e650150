"""Transports for tests: for each one, the writers of all train ranks as threads of this process, and readers.

    Way.publish ─► a thread per rank: WeightSender.stage ─► joined ─► PublishedWeights ─► Way.fetch: WeightReceiver

Ray's object store is a list of this process (`Store`), and the process group of the ranks is a barrier of threads (`RankEnd`). To hold a
new transport to the suite (`test_transports.py`), add its name to WAYS, and to `Way.damage` and `Way.stored_bytes` what it stores.
"""

import asyncio
import ctypes
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from qwen35_trainer.manifest.publication import TransportName
from qwen35_trainer.weights.division import ReplicaShape
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.published import (
    PublishedWeights,
    RegisteredShards,
    StagedShard,
    VersionBuckets,
    WeightBucket,
    joined,
)
from qwen35_trainer.weights.segment import MemorySegment, SegmentHandle
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transfer_agent import RemoteMemory
from qwen35_trainer.weights.transports import RankContext, WeightReceiver, nixl_agent, receiver, sender
from qwen35_trainer.weights.transports.nixl_agent import NixlAgent
from tests.patience import PATIENCE

WAYS: dict[str, tuple[TransportName, int]] = {
    "SharedMemory": ("SharedMemory", 1),
    "ObjectStore": ("ObjectStore", 1),
    "ObjectStore with changes": ("ObjectStore", 4),
    "Folder": ("Folder", 1),
    "Folder with changes": ("Folder", 4),
    "RDMA": ("RDMA", 1),
}
"""Each transport, and from how many versions one is published whole."""
AVAILABLE = [name for name in WAYS if name != "RDMA" or nixl_agent.is_installed()]
"""Those that this machine has."""
RANKS = 3
ALONE = ReplicaShape()
"""Replicas of one rank."""
BUCKET_BYTES = 256
"""Size of a bucket in tests, so that a few values fill several. No tensor of a test may be larger on one rank."""
WEIGHTS = {
    "matrix": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "vector": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scale": torch.tensor(0.5, dtype=torch.float64),
}


class Reference:
    """A reference to an object of the store, which lives as long as the reference."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.fetches = data, 0

    def __await__(self):
        self.fetches += 1
        yield from asyncio.sleep(0).__await__()
        return self.data


class Store:
    """The objects of Ray's object store that some reference still names."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Reference] = weakref.WeakSet()

    def put(self, data: np.ndarray) -> Reference:
        reference = Reference(data.copy())
        reference.data.flags.writeable = False
        self._alive.add(reference)
        return reference

    @property
    def stored_bytes(self) -> int:
        return sum(reference.data.size for reference in self._alive)


class Agents:
    """Agents of NIXL. Each takes half a second to make, so those of one test are used again by the next one."""

    def __init__(self) -> None:
        self._made: list[NixlAgent] = []
        self._taken = 0

    def take(self) -> NixlAgent:
        if self._taken == len(self._made):
            self._made.append(NixlAgent())
        self._taken += 1
        return self._made[self._taken - 1]

    def give_back(self) -> None:
        self._taken = 0


AGENTS = Agents()


class Collective:
    """What the threads of a process group share."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=PATIENCE)
        self.objects: list[Any] = [None] * ranks


class RankEnd:
    """A process group as one of its ranks has it. Objects are pickled, as between processes."""

    def __init__(self, collective: Collective, rank: int) -> None:
        self._collective, self._rank = collective, rank

    def gather(self, value: object) -> list[Any]:
        """Return the value of each rank."""
        self._collective.objects[self._rank] = pickle.dumps(value)
        self.wait()
        gathered = [pickle.loads(each) for each in self._collective.objects]
        self.wait()  # before any value is replaced
        return gathered

    def wait(self) -> None:
        self._collective.barrier.wait()

    def abort(self) -> None:
        """Let all ranks that wait fail, because this one does not come."""
        self._collective.barrier.abort()


def _broadcast_object_list(objects: list[Any], src: int, group: RankEnd) -> None:
    objects[:] = group.gather(objects)[src]


def _all_gather_object(objects: list[Any], value: object, group: RankEnd) -> None:
    objects[:] = group.gather(value)


class Way:
    """A transport with the writers of all ranks."""

    def __init__(
        self,
        name: TransportName,
        whole_every: int,
        store: Store,
        folder: Path,
        replica: ReplicaShape,
        others: frozenset[str],
    ) -> None:
        self.name, self.store, self.folder, self._others = name, store, folder, others
        self._collective = Collective(RANKS)
        self._ends = [RankEnd(self._collective, rank) for rank in range(RANKS)]
        contexts = [
            RankContext(rank, RANKS, end, folder, whole_every, replica, BUCKET_BYTES)
            for rank, end in enumerate(self._ends)
        ]
        self._senders = [sender(name, context) for context in contexts]

    def publish(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        needed: frozenset[int] = frozenset(),
        types: Mapping[str, torch.dtype] | None = None,
    ) -> PublishedWeights:
        """Publish a version, of which each rank has its rows. types: of tensors that are published in another type than theirs."""
        with ThreadPoolExecutor(RANKS) as threads:
            staged = [
                threads.submit(self._stage, rank, shards_of(rank, weights, types or {}), version, needed)
                for rank in range(RANKS)
            ]
        if failures := [each.exception() for each in staged if each.exception() is not None]:
            raise next((each for each in failures if not isinstance(each, threading.BrokenBarrierError)), failures[0])
        return joined([each.result() for each in staged], version)

    def _stage(self, rank: int, shards: list[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        try:
            return self._senders[rank].stage(shards, version, needed)
        except BaseException:
            self._ends[rank].abort()
            raise

    def damage(self, published: PublishedWeights) -> str:
        """Change one byte of a publication where replicas fetch it. Returns the name of its tensor."""
        layout = published.manifest.layout
        if isinstance(published.source, SegmentHandle):
            MemorySegment.open(published.source, writable=True).data[layout.tensors[0].offset] ^= 1
            return layout.tensors[0].name
        if isinstance(published.source, RegisteredShards):
            shard = published.source.shards[-1]
            _byte(shard.memory)[0] ^= 1
            return layout.tensors[published.manifest.parts[-shard.parts].tensor].name
        buckets = published.source.steps[-1].buckets
        number = max(number for number, bucket in enumerate(buckets) if bucket.parts[0].size)
        self._damage(published.source, buckets[number])
        part = published.manifest.parts[sum(len(bucket.parts) for bucket in buckets[:number])]
        return layout.tensors[part.tensor].name

    def _damage(self, source: VersionBuckets, bucket: WeightBucket) -> None:
        """Change the first byte of a bucket."""
        place = bucket.place
        if isinstance(place, Reference):
            damaged = place.data.copy()
            damaged[0] ^= 1
            place.data = damaged
            return
        with (source.folder / place.path).open("r+b") as file:
            file.seek(place.offset)
            [byte] = file.read(1)
            file.seek(place.offset)
            file.write(bytes([byte ^ 1]))

    def repair(self) -> None:
        """Let the ranks publish again after a failed publication."""
        self._collective.barrier.reset()

    def close(self) -> None:
        """End the writers."""
        self._senders.clear()
        gc.collect()

    def memory_bytes(self) -> int:
        """Return the bytes of all versions in memory that this process and the store hold, for writers and readers of all ways.

        Segments that the process had before the test belong to others, such as a model that a fixture keeps.
        """
        return self.store.stored_bytes + sum(size for inode, size in _segments().items() if inode not in self._others)

    def file_bytes(self) -> int:
        """Return the bytes of all versions in files of this way."""
        return sum(path.stat().st_size for path in self.folder.rglob("*.bin"))


def fetch(arriving: WeightReceiver, published: PublishedWeights) -> HostWeights:
    return asyncio.run(arriving.fetch(published))


def reader() -> WeightReceiver:
    """The receiving end of a replica, for every transport."""
    return receiver()


def bits(weights: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Type, shape and bytes of each tensor. Bytes are equal where values are, even if they are not numbers."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in weights.items()
    }


def shards_of(rank: int, weights: Mapping[str, Tensor], types: Mapping[str, torch.dtype]) -> list[WeightShard]:
    """Rows in order of ranks, as torch.chunk divides them: the last rank has fewer, or none."""
    shards = []
    for name, tensor in weights.items():
        whole = tensor.reshape(-1) if tensor.ndim == 0 else tensor
        chunks = whole.chunk(RANKS)
        start = sum(chunk.numel() for chunk in chunks[:rank])
        values = chunks[rank] if rank < len(chunks) else whole.flatten()[:0]
        shards.append(WeightShard(name, tuple(tensor.shape), types.get(name, tensor.dtype), start, values))
    return shards


def _byte(memory: RemoteMemory) -> Any:
    """The first byte of registered memory of this process."""
    return (ctypes.c_uint8 * 1).from_address(memory.address)


def _segments() -> dict[str, int]:
    """Inode → bytes of each segment that this process maps, in whole pages."""
    segments: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "qwen35-weights" in line:
            addresses, _, _, _, inode, *_ = line.split()
            begin, end = (int(address, 16) for address in addresses.split("-"))
            segments[inode] = end - begin
    return segments


@contextmanager
def ways(folder: Path) -> Iterator[Callable[..., Way]]:
    """Context manager: a function that sets one of WAYS up, with stand-ins for Ray's store and for process groups."""
    store = Store()
    gc.collect()
    others = frozenset(_segments())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "put", store.put)
        patch.setattr(dist, "barrier", RankEnd.wait)
        patch.setattr(dist, "broadcast_object_list", _broadcast_object_list)
        patch.setattr(dist, "all_gather_object", _all_gather_object)
        patch.setattr(nixl_agent, "NixlAgent", AGENTS.take)
        yield lambda name, replica=ALONE: Way(*WAYS[name], store, folder / name, replica, others)
        AGENTS.give_back()
