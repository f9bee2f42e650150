"""Writes a rank's shards of the weights to memory, in the type in which they are published, and computes checksums.

live shard ──CHUNK_BYTES at a time──► converted ──► its place in memory ──► checksum, while the processor's cache holds it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from qwen35_trainer.weights.checksum import checksum_of
from qwen35_trainer.weights.division import WHOLE, ReplicaShape, StagingPlan
from qwen35_trainer.weights.qwen3_5_divisions import divisions
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.weight_manifest import ITEM_BYTES, TensorPart, WeightLayout

CHUNK_BYTES = 2**20
"""Number of bytes that are converted and hashed at a time. They fit into the cache of a core."""
STAGING_THREADS = 4
"""Number of threads on which a train rank copies values from its device. Up to 16 ranks share the cores of a host."""
PART_BYTES = 32 * 2**20
"""Maximum size of a part in bytes. Each part has a checksum, and a longer shard is divided into several parts."""


@dataclass(frozen=True)
class WeightShard:
    """The part of one tensor of a publication that one train rank publishes."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Type in which the tensor is published."""
    start: int
    """Index of the shard's first value in the flattened tensor."""
    values: Tensor
    """Consecutive values of the tensor, on any device and in any type.

    Empty if other ranks publish all values of the tensor. The values may share memory with the live weights.
    """

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ShardPiece:
    """A piece of a rank's shard of a tensor. It is staged as one part of the version, with its own checksum."""

    tensor: int
    dtype: torch.dtype
    start: int
    """Offset of the piece's first byte among the staged bytes of the tensor."""
    size: int
    values: Tensor
    """The values of the piece in the shard: (values,), or (rows, values of a row) if the tensor is staged in blocks."""

    def write(self, memory: Memory) -> TensorPart:
        """Write the values, converted to `dtype`, to `memory` of `size` bytes. Returns the written part with its checksum."""
        with torch.no_grad():
            target = torch.from_numpy(memory).view(self.dtype).view(self.values.shape)
            checksum = _write(self.values, target, memory)
        return TensorPart(self.tensor, self.start, self.size, checksum)


def plan_of(shards: Iterable[WeightShard], replica: ReplicaShape) -> StagingPlan:
    """Return the plan by which the shards are staged for replicas of one shape.

    Every train rank computes the same plan.
    """
    return StagingPlan.of(divisions({shard.name: shard.shape for shard in shards}), replica)


def layout_of(shards: Iterable[WeightShard], plan: StagingPlan = WHOLE) -> WeightLayout:
    """Return the layout of a version. Every train rank computes the same layout from its own shards.

    shards: the shards of one rank, one for each tensor. plan: the staging plan, the same on every rank.
    """
    return WeightLayout.of(((shard.name, shard.shape, shard.dtype_name) for shard in shards), plan)


def pieces(shards: Sequence[WeightShard], most: int = PART_BYTES, plan: StagingPlan = WHOLE) -> Iterator[ShardPiece]:
    """Yield the shards of this rank in pieces. An empty shard has no pieces.

    most: maximum number of bytes of a piece, a multiple of 8. plan: where pieces end, and the order of their values.
    """
    for number, shard in enumerate(shards):
        item = ITEM_BYTES[shard.dtype_name]
        flat = shard.values.detach().reshape(-1)
        held = range(shard.start, shard.start + flat.numel())
        for piece in plan.pieces(shard.name, math.prod(shard.shape), held, most // item):
            values = flat.as_strided((piece.rows, piece.width), (piece.stride, 1), flat.storage_offset() + piece.first)
            values = values[0] if piece.rows == 1 else values
            yield ShardPiece(number, shard.dtype, piece.start * item, piece.size * item, values)


def write_pieces(contents: Iterable[tuple[ShardPiece, Memory]], threads: Executor) -> tuple[TensorPart, ...]:
    """Write each piece to its memory. Returns the written parts, in the order of the pieces.

    Values on a device are copied and hashed on `threads`, because a device sends twice as fast as one core computes
    checksums. Values on the host are written on the caller's thread, because torch itself uses several threads to
    convert them.
    """
    on_host: list[tuple[int, ShardPiece, Memory]] = []
    on_device: list[tuple[int, ShardPiece, Memory]] = []
    for number, (piece, memory) in enumerate(contents):
        (on_host if piece.values.device.type == "cpu" else on_device).append((number, piece, memory))
    written = dict(threads.map(_numbered, on_device)) | dict(map(_numbered, on_host))
    return tuple(written[number] for number in range(len(written)))


def _numbered(content: tuple[int, ShardPiece, Memory]) -> tuple[int, TensorPart]:
    number, piece, memory = content
    return number, piece.write(memory)


def tensor_checksum(tensor: Tensor) -> int:
    """Return the XXH3 checksum of a tensor's bytes, 64 bits.

    The tensor is copied if it is on a device or not contiguous.
    """
    flat = tensor.detach().cpu().contiguous().flatten()
    return checksum_of(flat.view(torch.uint8).numpy())


def _write(values: Tensor, target: Tensor, memory: Memory) -> int:
    """Copy values to `target`, which has the same shape.

    Returns the checksum of the written bytes. memory: the bytes of `target`.
    """
    if values.device.type != "cpu":  # converted there, and copied together
        target.copy_(values.to(target.dtype))
        return checksum_of(memory)
    digest = xxhash.xxh3_64()
    row_bytes = math.prod(values.shape[1:]) * target.itemsize
    step = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, len(values), step):
        target[first : first + step].copy_(values[first : first + step])
        digest.update(memory[first * row_bytes : (first + step) * row_bytes])
    return int(digest.intdigest())
