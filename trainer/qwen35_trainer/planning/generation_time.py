"""Seconds in which the rollout pool generates the responses of one update.

    decode step   of a replica with n sequences: reading the weights from memory, or the operations of n tokens, whichever takes longer;
                  reading the keys, values and states of n sequences; scheduling; all-reduces over tensor-parallel ranks
    experts       with E experts of which each token uses k, a step of n tokens reads E · (1 - (1 - k / E)^n) experts on average

In mode FullyAsync, generation runs ahead of training, so each replica always decodes as many sequences as its slots, its
memory and the window (the bound on untrained samples) allow. The responses of an update take their number of tokens
divided by the pool's tokens per second. In mode Colocated, generation and training take turns, so the generation of a
batch ends with its longest response. The generation takes the fixed part of a decode step for each token of the longest
response, and the part per sequence for each token of all responses. If a replica cannot decode all of its responses at
the same time, each further round adds the fixed part for each token of a mean response. A prompt is computed once for its group,
or by vLLM without its prefix cache once for each response.
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
    """The time in which the rollout pool generates the responses of one update."""

    sequences: float
    """Number of sequences that a replica decodes at a time. 0 if the time was measured."""
    step: float
    """Seconds of a decode step with `sequences` sequences. 0 if the time was measured."""
    prefill: float
    """Seconds of prefill of the prompts. 0 if the time was measured."""
    seconds: float
    """Seconds of prefill and decode steps together."""


@dataclass(frozen=True)
class DecodeStep:
    """The duration of a decode step with n sequences: `base` + n · `per_sequence` seconds.

    The option `qwen35 simulate --decode` takes the same two numbers.
    """

    base: float
    per_sequence: float

    @classmethod
    def of(
        cls, shape: ModelSizes, devices: int, per_node: int, device: Device, sequences: float, context: float
    ) -> DecodeStep:
        """Return the duration of a decode step of one replica.

        devices: number of devices of the replica. per_node: number of devices of a node. device: the kind of device.
        sequences: number of sequences for which `base` and `per_sequence` are computed; with a very different number,
        the duration is inaccurate. context: mean number of earlier positions of a sequence.
        """
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
    """Return the time in which the rollout pool generates the responses of one update.

    mean: mean tokens of a response. fitting: number of sequences of the maximum length whose cache fits in a replica.
    prompt: mean tokens of a prompt; None: data.maxPromptTokens.
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
    shares = pool.engine == "Torch" or pool.vllm is None or pool.vllm.prefixCache
    prompts = per_update / (spec.algorithm.groupSize if shares and spec.mode != "SFT" else 1)
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
