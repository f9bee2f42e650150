"""The manifest of a version of the weights. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorEntry:
    """The position, shape and type of one tensor in the buckets of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    size: int
    checksum: int
    """CRC-32 of its bytes."""


@dataclass(frozen=True)
class WeightManifest:
    """The table of contents of one published version of the weights: an entry for each tensor."""

    version: int
    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]
