"""What is known of a version of the weights without touching a byte of it. Imports without torch, as the driver does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies, and what it must look like."""

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
    """All tensors of one version."""

    version: int
    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]
