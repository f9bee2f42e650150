"""Writes a rank's shards of the weights to memory, in the type in which they are published, and computes checksums.

live shard ──CHUNK_BYTES at a time──► converted ──► its place in memory ──► checksum, while the processor's cache holds it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.weight_manifest import ITEM_BYTES, TensorPart, WeightLayout

CHUNK_BYTES = 2**20
"""Number of bytes that are converted and hashed at a time: they fit into the cache of a core."""
PART_BYTES = 32 * 2**20
"""Maximum size of a part, which has a checksum of its own. A longer shard is divided into several parts."""


@dataclass(frozen=True)
class WeightShard:
    """One rank's part of one tensor of a publication."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Type in which the tensor is published."""
    start: int
    """Index of the shard's first value in the flattened tensor."""
    values: Tensor
    """Consecutive values of the tensor, on any device and in any type. Empty if other ranks publish all its values.

    The values may share memory with the live weights.
    """

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ShardPiece:
    """A part of a shard, of at most PART_BYTES."""

    tensor: int
    dtype: torch.dtype
    start: int
    """Offset of the first byte from the start of the tensor."""
    size: int
    values: Tensor

    def write(self, memory: Memory) -> TensorPart:
        """Write the values, converted to `dtype`, to `memory` of `size` bytes. Returns the written part with its checksum."""
        with torch.no_grad():
            checksum = _write(self.values, torch.from_numpy(memory).view(self.dtype), memory)
        return TensorPart(self.tensor, self.start, self.size, checksum)


def layout_of(shards: Iterable[WeightShard]) -> WeightLayout:
    """Return the layout of a version from one rank's shards. It is the same on every rank."""
    return WeightLayout.of((shard.name, shard.shape, shard.dtype_name) for shard in shards)


def pieces(shards: Sequence[WeightShard], most: int = PART_BYTES) -> Iterator[ShardPiece]:
    """Yield the shards of this rank in pieces. An empty shard has no pieces.

    most: maximum number of bytes of a piece, a multiple of 8.
    """
    for number, shard in enumerate(shards):
        item = ITEM_BYTES[shard.dtype_name]
        flat = shard.values.detach().reshape(-1)
        for first in range(0, flat.numel(), most // item):
            values = flat[first : first + most // item]
            yield ShardPiece(number, shard.dtype, (shard.start + first) * item, values.numel() * item, values)


def tensor_checksum(tensor: Tensor) -> int:
    """Return the XXH3 of a tensor's bytes, 64 bits. The tensor is copied if it is on a device or not contiguous."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return int(xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy()))


def _write(values: Tensor, target: Tensor, memory: Memory) -> int:
    """Copy values to `target`, whose bytes are `memory`. Returns their checksum."""
    if values.device.type != "cpu":  # converted there, and copied together
        target.copy_(values.to(target.dtype))
        return int(xxhash.xxh3_64_intdigest(memory))
    digest = xxhash.xxh3_64()
    step = CHUNK_BYTES // target.itemsize
    for first in range(0, values.numel(), step):
        target[first : first + step].copy_(values[first : first + step])
        digest.update(memory[first * target.itemsize : (first + step) * target.itemsize])
    return int(digest.intdigest())
