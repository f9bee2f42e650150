"""A received version of the weights in the host memory of a replica: tensors that are views of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from torch import Tensor

from qwen35_trainer.weights.checksum import checksum_of
from qwen35_trainer.weights.division import Division, ReplicaRank
from qwen35_trainer.weights.fit import TensorKind
from qwen35_trainer.weights.rank_weights import RankWeights, in_order, tensor_of
from qwen35_trainer.weights.segment import MappedSegments, Memory, MemorySegment, SegmentHandle, SegmentUnavailable
from qwen35_trainer.weights.slice_plan import held_sections
from qwen35_trainer.weights.weight_manifest import (
    TensorEntry,
    TensorPart,
    WeightLayout,
    WeightManifest,
    WeightsDamaged,
    listed,
)

MAX_VERIFIERS = 16
"""Maximum number of threads on which a replica verifies checksums.

One core verifies 31.5 GB/s (benchmarks/weight_plan.py), and a host with eight network interfaces receives 400 GB/s.
"""


@dataclass(frozen=True)
class SharedVersion:
    """A reference to a version in shared memory, for another process of the host: segment handle and manifest.

    The manifest lists no parts, so the other process has no checksums to verify.
    """

    manifest: WeightManifest
    handle: SegmentHandle

    def open(self, segments: MappedSegments) -> HostWeights:
        """Return the tensors of the version, without verifying them. segments: segments that this process keeps mapped.

        Raises SegmentUnavailable if the segment is gone, is being written or holds another version, and TooLittleMemory
        if it cannot be mapped.
        """
        return HostWeights.of(self.manifest, segments.open(self.handle))


class HostWeights(Mapping[str, Tensor]):
    """The tensors of a version by name, on the host, as views of shared memory.

    Tensors that are staged in blocks are copies. The memory is not overwritten while this object or a view of the
    memory exists. Do not write to the tensors: other replicas use the same memory, and a write would end the process,
    because the memory is mapped read-only. A pickled object contains the manifest and the segment's handle, and no
    values. Another process of the host that unpickles it maps the same memory, as long as some process still holds
    that memory.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        memory: Memory,
        segment: MemorySegment | None = None,
        elsewhere: Iterable[SharedVersion] = (),
    ) -> None:
        """Create the tensors that `manifest` describes.

        memory: the bytes of the version. segment: the segment that `memory` belongs to; None: the memory belongs to
        this process alone, so the object cannot be pickled. elsewhere: the same version in the memory of each other
        node of the replica, in their order.
        """
        self.manifest = manifest
        self._memory, self._segment = memory, segment
        self._elsewhere = tuple(elsewhere)
        self._entries = {entry.name: entry for entry in manifest.layout.tensors}

    @classmethod
    def open(cls, manifest: WeightManifest, handle: SegmentHandle) -> HostWeights:
        """Open a version in shared memory, without verifying it.

        Raises SegmentUnavailable if the segment is gone, is being written or holds another version, and TooLittleMemory
        if it cannot be mapped.
        """
        return cls.of(manifest, MemorySegment.open(handle))

    @classmethod
    def of(cls, manifest: WeightManifest, segment: MemorySegment) -> HostWeights:
        """Return the version in an open segment, without verifying it.

        Raises SegmentUnavailable if the segment is being written or holds another version.
        """
        memory = segment.read()
        if memory is None or segment.version != manifest.version:
            raise SegmentUnavailable(f"weights of version {manifest.version} were replaced by a later version")
        return cls(manifest, memory, segment)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        return in_order(tensor_of(_bytes(entry, self._memory), entry.dtype), entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Callable[..., HostWeights], tuple[WeightManifest, SegmentHandle]]:
        return HostWeights.open, (self.manifest, self.handle)

    @property
    def is_shared(self) -> bool:
        """Whether other processes of the host can open the same memory."""
        return self._segment is not None

    @property
    def shared(self) -> SharedVersion:
        """A reference with which another process of the host opens the same memory.

        The reference leaves out the checksums, because they are most of the `WeightManifest` of a large model. Raises
        TypeError if the memory belongs to this process alone.
        """
        return SharedVersion(replace(self.manifest, parts=()), self.handle)

    @property
    def on_all_nodes(self) -> tuple[SharedVersion, ...]:
        """The version in the memory of each node of the replica, this one first. Raises TypeError as `shared` does."""
        return self.shared, *self._elsewhere

    def with_nodes(self, elsewhere: Iterable[SharedVersion]) -> HostWeights:
        """Return the same tensors, together with the same version in the memory of the replica's other nodes, in their order."""
        return HostWeights(self.manifest, self._memory, self._segment, elsewhere)

    @property
    def handle(self) -> SegmentHandle:
        """The handle with which another process of the host opens the same memory.

        Raises TypeError if the memory belongs to this process alone.
        """
        if self._segment is None:
            raise TypeError("these weights are in the memory of this process alone, so they cannot be pickled")
        return self._segment.handle

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def kinds(self) -> dict[str, TensorKind]:
        """Shape and type of each tensor, from the manifest, without reading a tensor."""
        return {name: TensorKind(entry.shape, entry.dtype) for name, entry in self._entries.items()}

    def sliced(self, divisions: Mapping[str, Division], who: ReplicaRank) -> RankWeights:
        """Return the tensors as one rank of a replica reads them.

        Divided tensors are slices, and all other tensors are whole. divisions: name of each tensor that the ranks
        divide → its division. who: the rank.
        """
        layout = self.manifest.layout
        return RankWeights(layout, held_sections(layout, divisions, who), _WholeVersion(layout, self._memory))

    def copy_to(self, memory: Memory) -> None:
        """Copy the bytes of the version to `memory`, which must have `manifest.layout.size` bytes."""
        memory[:] = self._memory[: memory.size]

    def verify(self, threads: Executor | None = None) -> None:
        """Verify the bytes of the version against all checksums of its manifest.

        threads: executor on which the work is done; None: the caller's thread. Raises WeightsDamaged, naming the
        tensors that are incomplete or damaged.
        """
        self.manifest.check_complete()
        parts = self.manifest.parts
        if threads is None:
            damaged = self._damaged(parts)
        else:
            batches = (parts[number::MAX_VERIFIERS] for number in range(MAX_VERIFIERS))
            damaged = set[int]().union(*threads.map(self._damaged, batches))
        raise_if_damaged(self.manifest, damaged)

    def _damaged(self, parts: Sequence[TensorPart]) -> set[int]:
        """Return the indices, in the layout, of the tensors with a part that does not match its checksum."""
        return {part.tensor for part in parts if not self._is_intact(part)}

    def _is_intact(self, part: TensorPart) -> bool:
        begin = self.manifest.layout.tensors[part.tensor].offset + part.start
        return is_intact(part, self._memory[begin : begin + part.size])


@dataclass(frozen=True)
class _WholeVersion:
    """The bytes of a whole version in memory."""

    layout: WeightLayout
    memory: Memory

    def of(self, tensor: int, start: int, stop: int) -> Memory:
        offset = self.layout.tensors[tensor].offset
        return self.memory[offset + start : offset + stop]


def verifiers(cores: int) -> int:
    """Return the number of threads on which to verify checksums on a machine with `cores` cores.

    The result is half of the cores, because the engine needs the other half, but at least 1 and at most MAX_VERIFIERS.
    """
    return max(1, min(MAX_VERIFIERS, cores // 2))


def is_intact(part: TensorPart, data: Memory) -> bool:
    """Return whether `data` has the size and the checksum of the bytes that were published as `part`."""
    return data.size == part.size and checksum_of(data) == part.checksum


def raise_if_damaged(manifest: WeightManifest, tensors: set[int]) -> None:
    """Raise WeightsDamaged, naming the damaged tensors, if there are any.

    tensors: indices of the damaged tensors in the layout.
    """
    if tensors:
        names = [manifest.layout.tensors[number].name for number in sorted(tensors)]
        raise WeightsDamaged(
            f"weights of version {manifest.version}: checksum of {listed(names)} differs; the transfer damaged the bytes"
        )


def _bytes(entry: TensorEntry, memory: Memory) -> Memory:
    return memory[entry.offset : entry.offset + entry.size]
