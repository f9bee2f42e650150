"""A published version of the weights: its manifest, and its buckets in Ray's object store.

    TrainEngine.weights ─► TrainWorker.publication ─► put ─► object store ─► RolloutPool.publish ─► RolloutWorker.load
    gathered on rank 0     one tensor at a time       buckets, checksums     to every replica       verified, mapped

The driver imports this module, so it imports torch only where tensors are copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from qwen35_trainer.weights.weight_manifest import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the weights in the object store. Ray keeps the buckets as long as this object exists."""

    manifest: WeightManifest
    buckets: tuple[ray.ObjectRef[Any], ...]


def put(weights: Iterable[tuple[str, Tensor]], version: int) -> PublishedWeights:
    """Copy `weights` into the object store as `version`, one bucket after another."""
    from qwen35_trainer.weights.weight_buckets import pack

    return PublishedWeights(*pack(weights, version, store=ray.put))
