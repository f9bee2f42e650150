"""What is known of a version of the weights without touching a byte of it. Imports without torch, as the driver does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray


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


@dataclass(frozen=True)
class Publication:
    """A version of the weights in Ray's object store. It lives as long as this object does."""

    manifest: WeightManifest
    buckets: tuple[ray.ObjectRef[Any], ...]
