"""The memory of a rank of the Megatron engine.

parameters        in the model's precision: those of this pipeline stage, with matrices divided over tensor-parallel ranks and
                  experts over expert-parallel ranks
gradients         float32 buffers of all these parameters, allocated once
                  (megatron-core, `DistributedDataParallelConfig.grad_reduce_in_fp32`)
optimizer state   two float32 moments, and float32 master weights if the model is in bfloat16, sharded over the ranks with the same
                  parameters (ZeRO-1, arXiv:1910.02054, section 5; megatron-core, docs "distributed optimizer":
                  6 + 12 / d bytes per parameter with d data-parallel ranks)
activations       those of all micro-batches that the stage has begun and not ended: with P stages, the first stage has
                  P of them (1F1B, arXiv:2104.04473, section 2.2)
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.train import ParallelismSpec
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import activations, head_memory, parameters
from qwen35_trainer.planning.activations import Computation, Kernels
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize
from qwen35_trainer.planning.parameters import Parameters
from qwen35_trainer.planning.train_memory import RankMemory, TrainMemory, largest


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: consecutive decoder layers, and the embedding or the output layer at an end of the model."""

    first: int
    """Index of the stage's first layer in the model, from 0."""
    layers: int
    """Number of decoder layers of the stage."""
    is_first: bool
    is_last: bool
    begun: int
    """Maximum number of micro-batches whose activations the stage holds at a time."""


def stages(layers: int, count: int) -> list[Stage]:
    """Return the pipeline stages of a model. The layers are divided as in the engine (`engines/megatron/layout.py`).

    layers: number of decoder layers of the model. count: number of stages.
    """
    if layers % count == 0:
        sizes = [layers // count] * count
    elif count == 2:
        sizes = [layers - layers // 2, layers // 2]
    else:
        middle = -(-layers // count)
        if layers - middle * (count - 2) < 2:
            middle -= 1
        rest = layers - middle * (count - 2)
        sizes = [rest - rest // 2, *[middle] * (count - 2), rest // 2]
    starts = [sum(sizes[:number]) for number in range(count)]
    return [
        Stage(start, size, number == 0, number == count - 1, count - number)
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def stage_parameters(shape: ModelSizes, stage: Stage) -> Parameters:
    """Return the numbers of parameters of a stage, before tensor-parallel and expert-parallel ranks divide them."""
    held = parameters.layers(shape, stage.first, stage.layers)
    if stage.is_first:
        held += parameters.embedding(shape)
    if stage.is_last:
        held += Parameters(repeated=shape.hidden)
        if not (shape.tied and stage.is_first):
            held += parameters.embedding(shape)
    return held


def rank_memory(shape: ModelSizes, spec: TrainingSpec, kernels: Kernels, *, on_cpu: bool = False) -> RankMemory:
    """Return the memory of a rank of the Megatron engine, on the pipeline stage that needs most at its peak.

    on_cpu: whether the rank runs without an accelerator. Attention then keeps its score matrices, as it does without
    Transformer Engine, and gloo's reduce-scatter copies the buffer of gradients.
    """
    cut = spec.train.parallelism
    ranks = [_stage_memory(shape, spec, stage, kernels, on_cpu=on_cpu) for stage in stages(shape.layers, cut.pipeline)]
    return max(ranks, key=lambda rank: rank.device.total)


def _stage_memory(shape: ModelSizes, spec: TrainingSpec, stage: Stage, kernels: Kernels, *, on_cpu: bool) -> RankMemory:
    cut, width = spec.train.parallelism, 2 if spec.model.precision == "BF16" else 4
    held, micro = stage_parameters(shape, stage), MicroBatchSize.of(spec)
    dense, experts = _on_rank(held, cut)
    master = 4 if width == 2 else 0  # float32 parameters are their own master copies
    state = TrainMemory(
        parameters=width * (dense + experts),
        gradients=4 * (dense + experts),
        optimizer=(master + 8) * (dense / spec.data_parallel + experts / spec.expert_data_parallel),
        reference=width * (dense + experts) if spec.mode != "SFT" and spec.algorithm.kl.placement != "None" else 0,
    )
    # Sequence parallelism divides what is between matrix products too, so every term is divided.
    length = micro.length + -micro.length % cut.tensor
    tokens = micro.tokens * length / micro.length / cut.tensor
    computation = Computation(width, kernels, tokens, length, matrices=on_cpu)
    full = sum(
        (number + 1) % shape.full_attention_interval == 0 for number in range(stage.first, stage.first + stage.layers)
    )
    recompute = spec.train.activationCheckpointing
    begun = min(stage.begun, micro.count)
    of_micro_batch = activations.stack(shape, computation, stage.layers, full, recompute=recompute)
    temporaries = activations.backward_temporaries(shape, computation)
    kept = of_micro_batch - temporaries - (activations.largest_layer(shape, computation) if recompute else 0.0)
    largest_matrix = 4 * shape.vocabulary * shape.hidden / cut.tensor if stage.is_first or stage.is_last else 0.0
    moments = {"backward pass of a layer": state.with_parts(activations=of_micro_batch + (begun - 1) * kept)}
    if on_cpu:
        moments["sum of gradients"] = state.with_parts(gradients=state.gradients)
    if stage.is_last:
        head = head_memory.megatron(shape.vocabulary, cut.tensor, micro.scored) + largest_matrix * width / 4
        moments["backward pass of the head"] = state.with_parts(activations=begun * kept, head=head)
    if stage.is_first:
        moments["gradient of the table"] = state.with_parts(
            activations=(begun - 1) * kept, head=largest_matrix * width / 4
        )
    peak, memory = largest(moments)
    return RankMemory(peak, memory, 0.0, state.total)


def _on_rank(held: Parameters, cut: ParallelismSpec) -> tuple[float, float]:
    """Return (dense parameters, experts' parameters) of a stage on one rank."""
    return held.divided / cut.tensor + held.repeated, held.experts / (cut.expert * cut.expertTensor)
