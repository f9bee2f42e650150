"""A version of the weights in Ray's object store. Imports without torch, as the driver does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from qwen35_trainer.weights.manifest import WeightManifest


@dataclass(frozen=True)
class Publication:
    """A version of the weights in Ray's object store. It lives as long as this object does."""

    manifest: WeightManifest
    buckets: tuple[ray.ObjectRef[Any], ...]
