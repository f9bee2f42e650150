"""The training engine that the manifest names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen35_trainer.engines.train_engine import TrainEngine

if TYPE_CHECKING:
    import torch

    from qwen35_trainer.engines.origin import Origin
    from qwen35_trainer.manifest import TrainingSpec


def create(source: Origin, spec: TrainingSpec, device: torch.device, *, pictures: bool) -> TrainEngine:
    """Build this rank's engine of `spec.train.engine`. Collective.

    source: where the weights come from. pictures: whether any rank's batches may contain pictures. Raises ValueError for an
    engine that this release does not have, and whatever the engine raises.
    """
    if spec.train.engine == "FSDP":
        from qwen35_trainer.engines.fsdp.engine import FSDPEngine  # each engine's libraries take seconds to import

        return FSDPEngine(source, spec, device, pictures=pictures)
    raise ValueError(f"spec.train.engine: this release has no {spec.train.engine} engine; set it to FSDP")
