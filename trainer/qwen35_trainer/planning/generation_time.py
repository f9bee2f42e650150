"""Seconds in which the rollout pool generates the responses of one update.

    a decode step of n sequences    weights that it reads + n · (keys, values and states that a sequence reads) at the memory's bandwidth,
                                    or the operations of n tokens, whichever takes longer; scheduling; sums over tensor-parallel ranks
    experts                         n tokens with k of E experts each touch E · (1 - (1 - k / E)^n) experts in the mean

Ahead of training (FullyAsync), slots are always taken: an update takes its tokens divided by the pool's rate. In turns with it (Colocated),
an update ends with its longest response: the steps of that one, and the work of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.catalog.devices import Device
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import floating_point_operations, parameters, rollout_memory
from qwen35_trainer.planning.assumptions import BANDWIDTH_SHARE, PREFILL_UTILISATION, STEP_SECONDS, SUM_SECONDS


@dataclass(frozen=True)
class GenerationTime:
    """Seconds for one update."""

    sequences: float
    """Sequences that a replica decodes at a time."""
    step: float
    """Seconds of a decode step of that many sequences."""
    prefill: float
    seconds: float
    """All seconds: prefill and decode steps."""


@dataclass(frozen=True)
class DecodeStep:
    """The time of a decode step: `base` + n · `per_sequence`, the two numbers of `qwen35 simulate --decode`."""

    base: float
    per_sequence: float

    @classmethod
    def of(
        cls, shape: ModelSizes, devices: int, per_node: int, device: Device, sequences: float, context: float
    ) -> DecodeStep:
        """Return the step of a replica of `devices` devices around `sequences` sequences with `context` positions each."""
        bandwidth = device.bandwidth * BANDWIDTH_SHARE
        text = parameters.text(shape)
        touched = 1.0
        if shape.experts:
            touched = 1 - (1 - shape.experts_per_token / shape.experts) ** max(1.0, sequences)
        table = parameters.embedding(shape).total  # of input tokens: only the rows of the step's tokens are read
        read = 2 * ((text.divided - (0 if shape.tied else table) + text.experts * touched) / devices + text.repeated)
        place = "node" if devices <= per_node else "network"
        sums = 2 * shape.layers * SUM_SECONDS[place] if devices > 1 else 0.0
        kept = context * rollout_memory.cache_per_token(shape, devices, 2) + 2 * rollout_memory.state(shape, devices)
        operations = floating_point_operations.forward(shape, context) / devices
        work = max(0.0, operations / (device.flops * PREFILL_UTILISATION) - read / bandwidth / max(1.0, sequences))
        return cls(read / bandwidth + sums + STEP_SECONDS, kept / bandwidth + work)


def generation_time(
    shape: ModelSizes,
    spec: TrainingSpec,
    device: Device,
    mean: float,
    *,
    fitting: int,
    prompt: float | None = None,
) -> GenerationTime:
    """Return the time of the responses of an update.

    mean: tokens of a response in the mean. fitting: sequences of the maximum length whose cache fits a replica. prompt: tokens of a
    prompt in the mean; None: the maximum.
    """
    pool, data = spec.rollout, spec.data
    assert pool is not None
    of_prompt = data.maxPromptTokens if prompt is None else prompt
    longest = data.maxPromptTokens + data.maxResponseTokens
    room = min(pool.maxSequencesPerReplica, max(1.0, fitting * longest / (of_prompt + mean)))
    replicas = max(1, spec.rollout_replicas)
    of_update = spec.samples_per_update * spec.async_.updatesPerBatch / replicas
    ahead = spec.mode == "FullyAsync"
    window = of_update * spec.async_.batchesPerPublication * (1 + spec.effective_async.stalenessThreshold)
    sequences = max(1.0, min(room, window if ahead else of_update))
    context = of_prompt + mean / 2
    step = DecodeStep.of(shape, pool.tensorParallel, spec.accelerator.devicesPerNode, device, sequences, context)
    per_update = spec.samples_per_update / replicas
    prompts = per_update / (1 if spec.mode == "SFT" else spec.algorithm.groupSize)
    operations = prompts * of_prompt * floating_point_operations.forward(shape, of_prompt / 2)
    prefill = operations / (pool.tensorParallel * device.flops * PREFILL_UTILISATION)
    duration = step.base + step.per_sequence * sequences
    if ahead:
        decode = per_update * mean / sequences * duration
    else:
        rounds = max(1.0, of_update / room)
        steps = data.maxResponseTokens if rounds == 1 else mean * (rounds - 1) + data.maxResponseTokens
        decode = (step.base * steps + step.per_sequence * of_update * mean) / spec.async_.updatesPerBatch
    return GenerationTime(sequences, duration, prefill, prefill + decode)
