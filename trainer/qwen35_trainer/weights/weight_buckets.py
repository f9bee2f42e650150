"""A version of the weights as bytes: a manifest, and buckets that hold the tensors one after another.

    trainer ─► tensors, one at a time ─► a bucket ─► stored (shared memory, or the wire) ─► the next bucket …   + manifest
    replica ─► sizes and checksums of all buckets ─► engine.load: on the CPU it computes with the buckets themselves

The trainer packs a *copy* of the weights, because replicas may still read it while the optimizer changes the live
weights. A node holds a version in memory only once, even if several replicas on the CPU compute with it: a second copy
of 0.8B weights is 1.5 GB.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.weights.weight_manifest import TensorEntry, WeightManifest

type Bucket = NDArray[np.uint8]

BUCKET_BYTES = 512 * 2**20
"""A bucket is closed when the next tensor would pass this size; a larger tensor has a bucket of its own."""
ALIGNMENT = 64
"""Tensors start at multiples of this number of bytes in their bucket: a cache line, which vector instructions load best."""


class WeightsDamaged(RuntimeError):
    """The bytes of published weights do not match the checksum or the size in their manifest."""

    failure = FailureReason.WEIGHTS_DAMAGED


def pack[Stored](
    weights: Iterable[tuple[str, Tensor]], version: int, store: Callable[[Bucket], Stored]
) -> tuple[WeightManifest, tuple[Stored, ...]]:
    """Copy `weights`, on any device, into buckets, and call `store` with each full bucket.

    store: a function that copies a bucket and returns a reference to the copy. It must copy, because the memory of the
    bucket is used again. Returns the manifest and these references in order. At most one bucket and one tensor are in
    memory.
    """
    tensors: list[TensorEntry] = []
    stored: list[Stored] = []
    sizes: list[int] = []
    for bucket, entries in _buckets(weights):
        tensors += entries
        stored.append(store(bucket))
        sizes.append(bucket.size)
    return WeightManifest(version, tuple(tensors), tuple(sizes)), tuple(stored)


class Unpacked(Mapping[str, Tensor]):
    """The tensors of a version, on the host. Each is a view of its bucket, and keeps the bucket's memory alive.

    Do not write to the tensors: all replicas of a node share the buckets. The buckets are mapped read-only, and a write
    would end the process.
    """

    def __init__(self, manifest: WeightManifest, buckets: Sequence[Bucket]) -> None:
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._buckets = buckets

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            data = torch.from_numpy(_part(entry, self._buckets))
        data = data.as_strided((entry.size,), (1,))  # NumPy gives an empty array any stride
        return data.view(getattr(torch, entry.dtype)).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}


def unpack(manifest: WeightManifest, buckets: Sequence[Bucket]) -> Unpacked:
    """Return the tensors of a version after verifying their checksums.

    Raises WeightsDamaged with the first bucket or tensor that does not match the manifest.
    """
    sizes = tuple(bucket.size for bucket in buckets)
    if sizes != manifest.bucket_sizes:
        raise WeightsDamaged(
            f"weights of version {manifest.version}: buckets of {sizes} bytes, expected {manifest.bucket_sizes}"
        )
    for entry in manifest.tensors:
        if zlib.crc32(_part(entry, buckets)) != entry.checksum:
            raise WeightsDamaged(
                f"weights of version {manifest.version}: checksum of {entry.name} differs; the transfer damaged it"
            )
    return Unpacked(manifest, buckets)


def shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name. Those of an unpacked version come from its manifest, without reading a tensor."""
    if isinstance(weights, Unpacked):
        return weights.shapes
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def check_shapes(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor], version: int) -> None:
    """Raise ValueError naming all tensors that are missing, unexpected or of another shape than the rollout model expects."""
    other = shapes(weights)
    misshapen = sorted(name for name in expected.keys() & other.keys() if expected[name] != other[name])
    if misshapen or expected.keys() != other.keys():
        raise ValueError(
            f"weights of version {version} do not fit the rollout model: missing {sorted(expected.keys() - other.keys())}, "
            f"unexpected {sorted(other.keys() - expected.keys())}, of another shape {misshapen}"
        )


def check_types(weights: Mapping[str, Tensor], version: int) -> None:
    """Raise ValueError naming all tensors that do not hold floating-point numbers."""
    wrong = sorted(name for name, tensor in weights.items() if not tensor.is_floating_point())
    if wrong:
        raise ValueError(
            f"weights of version {version} do not fit the rollout model: no floating-point numbers {wrong}"
        )


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Bucket, list[TensorEntry]]]:
    """Yield each bucket with the entries of its tensors. A bucket is valid only until the next one is yielded."""
    memory = np.zeros(BUCKET_BYTES, dtype=np.uint8)  # pages that are not written to cost nothing
    number, filled, entries = 0, 0, list[TensorEntry]()
    for name, tensor in weights:
        data = _bytes(tensor)
        start = -(-filled // ALIGNMENT) * ALIGNMENT
        if entries and start + data.size > BUCKET_BYTES:
            yield memory[:filled], entries
            number, start, filled, entries = number + 1, 0, 0, []
        entry = TensorEntry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            bucket=number,
            offset=start,
            size=data.size,
            checksum=zlib.crc32(data),
        )
        if data.size > BUCKET_BYTES:
            yield data, [entry]
            number += 1
            continue
        filled = start + data.size
        memory[start:filled] = data
        entries.append(entry)
    if entries:
        yield memory[:filled], entries


def _part(entry: TensorEntry, buckets: Sequence[Bucket]) -> Bucket:
    return buckets[entry.bucket][entry.offset : entry.offset + entry.size]


def _bytes(tensor: Tensor) -> Bucket:
    """Return the tensor's bytes in order. They share the tensor's memory if it is contiguous and on the host."""
    flat: Bucket = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    return flat
