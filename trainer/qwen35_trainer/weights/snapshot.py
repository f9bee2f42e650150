"""A version of the weights as bytes: a manifest, and buckets that hold the tensors one after another.

    trainer ─► pack ─► buckets (shared memory, or the wire) + manifest ─► unpack: names, sizes, checksums ─► engine.load

The trainer packs a *copy*: replicas may still read it while the optimizer already changes the live weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.weights.publication import TensorEntry, WeightManifest

BUCKET_BYTES = 512 * 2**20
"""A bucket is closed when the next tensor would pass this size; a larger tensor has a bucket of its own."""


class WeightsDamaged(RuntimeError):
    """A bucket does not hold what the manifest says."""


def pack(weights: Mapping[str, Tensor], version: int) -> tuple[WeightManifest, list[NDArray[np.uint8]]]:
    """Copy `weights` (any device) into host buckets. Returns the manifest and the buckets, in order."""
    entries: list[TensorEntry] = []
    buckets: list[NDArray[np.uint8]] = []
    for members in _bucketed(weights):
        bucket = np.empty(sum(tensor.numel() * tensor.element_size() for _, tensor in members), dtype=np.uint8)
        offset = 0
        for name, tensor in members:
            data = _bytes(tensor)
            bucket[offset : offset + data.size] = data
            entries.append(
                TensorEntry(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    bucket=len(buckets),
                    offset=offset,
                    size=data.size,
                    checksum=zlib.crc32(data),
                )
            )
            offset += data.size
        buckets.append(bucket)
    return WeightManifest(version, tuple(entries), tuple(b.size for b in buckets)), buckets


def unpack(manifest: WeightManifest, buckets: Sequence[NDArray[np.uint8]]) -> dict[str, Tensor]:
    """The tensors of a version, verified, on the host.

    Raises WeightsDamaged naming the first bucket or tensor that is not what the manifest says.
    """
    sizes = tuple(bucket.size for bucket in buckets)
    if sizes != manifest.bucket_sizes:
        raise WeightsDamaged(
            f"weights of version {manifest.version}: buckets of {sizes} bytes, expected {manifest.bucket_sizes}"
        )
    weights: dict[str, Tensor] = {}
    for entry in manifest.tensors:
        data = buckets[entry.bucket][entry.offset : entry.offset + entry.size]
        if zlib.crc32(data) != entry.checksum:
            raise WeightsDamaged(
                f"weights of version {manifest.version}: checksum of {entry.name} differs; the transfer damaged it"
            )
        # Copied, because shared buckets are read-only and torch knows no read-only tensors.
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        np.copyto(_bytes(tensor), data)
        weights[entry.name] = tensor
    return weights


def _bucketed(weights: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    members: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if members and filled + size > BUCKET_BYTES:
            yield members
            members, filled = [], 0
        members.append((name, tensor))
        filled += size
    if members:
        yield members


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's bytes in order: its own memory where that is contiguous and on the host, else a copy."""
    flat: NDArray[np.uint8] = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    return flat
