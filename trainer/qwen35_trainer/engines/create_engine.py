"""Build the training engine that the manifest names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen35_trainer.engines.train_engine import TrainEngine

if TYPE_CHECKING:
    import torch

    from qwen35_trainer.engines.origin import Origin
    from qwen35_trainer.manifest import TrainingSpec


def create(source: Origin, spec: TrainingSpec, device: torch.device, *, pictures: bool) -> TrainEngine:
    """Build this rank's engine, which `spec.train.engine` names. Collective.

    source: where the weights come from. pictures: whether any rank's batches may contain pictures. Raises the exceptions
    of the engine's constructor, such as ValueError if the manifest does not fit the model.
    """
    if spec.train.engine == "FSDP":
        from qwen35_trainer.engines.fsdp.engine import FSDPEngine  # each engine's libraries take seconds to import

        return FSDPEngine(source, spec, device, pictures=pictures)
    if spec.accelerator.profile == "CPU":
        from qwen35_trainer.engines.megatron import cpu

        cpu.install()
    from qwen35_trainer.engines.megatron.engine import MegatronEngine

    return MegatronEngine(source, spec, device, pictures=pictures)
