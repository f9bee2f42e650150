"""The seconds in which the train pool computes one update."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.catalog.devices import Device
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import floating_point_operations
from qwen35_trainer.planning.assumptions import DENSE_UTILISATION, EXPERT_UTILISATION


@dataclass(frozen=True)
class TrainTime:
    """The time in which the train pool computes one update, without waiting for a batch."""

    passes: float
    """Number of forward passes that cost as much as the update, as `forward_passes` counts them. 0 if the time was measured."""
    seconds: float
    bubble: float
    """Share of the time in which pipeline stages wait for each other."""


def forward_passes(spec: TrainingSpec) -> float:
    """Return the cost of one update, counted in forward passes.

    The forward pass counts 1 and the backward pass 2. Each of the following adds 1, if the training has it: recomputed
    activations, the reference model of a KL penalty, and the log-probs of the proximal policy. A correction needs these
    log-probs if a batch has several updates.
    """
    passes = 3.0 + (1.0 if spec.train.activationCheckpointing else 0.0)
    if spec.mode == "SFT":
        return passes
    algorithm = spec.algorithm
    if algorithm.kl.placement != "None":
        passes += 1
    if spec.async_.updatesPerBatch > 1 and algorithm.correction.type != "None":
        passes += 1
    return passes


def train_time(
    shape: ModelSizes, spec: TrainingSpec, device: Device, tokens_per_sample: float, utilisation: float | None = None
) -> TrainTime:
    """Return the time in which the train pool computes one update.

    tokens_per_sample: mean tokens of a prompt and its response. utilisation: share of the device's peak operations per
    second; None: the assumed one. With P pipeline stages of v virtual stages each, and m micro-batches, a stage is idle
    during the fraction (P - 1) / (v·m + P - 1) of the time, the bubble (interleaved 1F1B, arXiv:2104.04473,
    section 2.2).
    """
    share = utilisation or (EXPERT_UTILISATION if shape.experts else DENSE_UTILISATION)
    passes, samples = forward_passes(spec), spec.samples_per_update
    operations = samples * tokens_per_sample * floating_point_operations.forward(shape, tokens_per_sample / 2) * passes
    stages, virtual = spec.train.parallelism.pipeline, spec.train.parallelism.virtualPipeline
    batch = spec.train.batch
    per_rank = samples / spec.data_parallel
    micro = per_rank / batch.microBatchSequences
    if batch.dynamicMicroBatches:
        micro = per_rank * tokens_per_sample / batch.maxTokensPerDevice
    micro = max(1.0, micro)
    bubble = (stages - 1) / (virtual * micro + stages - 1)
    seconds = operations / (spec.world_size * device.flops * share) / (1 - bubble)
    return TrainTime(passes, seconds, bubble)
