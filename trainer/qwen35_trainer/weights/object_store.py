"""Publication through Ray's object store: packed once by the trainer, read by every replica from shared memory."""

from __future__ import annotations

from collections.abc import Iterable

import ray
from torch import Tensor

from qwen35_trainer.weights.publication import Publication
from qwen35_trainer.weights.snapshot import pack


def put(weights: Iterable[tuple[str, Tensor]], version: int) -> Publication:
    """Copy `weights` into the object store as `version`, one bucket after another."""
    return Publication(*pack(weights, version, store=ray.put))
