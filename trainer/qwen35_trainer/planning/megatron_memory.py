"""The memory of a rank of the Megatron engine.

parameters        in the model's precision: those of this pipeline stage, with matrices divided over tensor-parallel ranks and
                  experts over expert-parallel ranks
vision tower      whole on every rank of the first stage. It has gradients and optimizer state only if the data contain pictures
                  (`engines/megatron/pictures.py`)
gradients         float32 buffers of all these parameters, allocated once
                  (megatron-core, `DistributedDataParallelConfig.grad_reduce_in_fp32`)
optimizer state   two float32 moments of the gradient for each parameter, and float32 master weights if the model is in
                  bfloat16, sharded over the ranks with the same parameters (ZeRO-1, arXiv:1910.02054, section 5;
                  megatron-core, docs "distributed optimizer": 6 + 12 / d bytes per parameter with d data-parallel ranks)
offload           the part of offloaded data that the device still holds (`engines/megatron/offload.py`). Of the optimizer state:
                  in the optimizer step all master weights, and the moments of one group of parameters at a time; all of it while a
                  checkpoint is saved, without gradients. Of the parameters: those of the model that computes (trained or reference model)
start             megatron-core moves the parameters to a buffer while the gradients have theirs: first those of dense layers and then
                  those of experts exist twice. The optimizer does not exist yet
published         at a publication the parts that the rank publishes, in the model's precision. To join a parameter, a rank has its parts on
                  all tensor-parallel ranks and the whole parameter at the same time, in a checkpoint in float32, next to its own part,
                  which is summed from the data-parallel ranks. The largest parameters are the tables of tokens, and the experts of a
                  layer that the rank has (`engines/megatron/published_model.py`)
activations       those of all micro-batches whose forward pass the stage has begun and whose backward pass it has not ended. With
                  P stages, the first stage holds P of them (1F1B, arXiv:2104.04473, section 2.2). With v virtual stages per stage,
                  it holds 2 (P - 1) + (v - 1) P + 1, each for 1 / v of the stage's layers (interleaved 1F1B, ibid.)
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
from qwen35_trainer.planning.tower_activations import TowerActivations
from qwen35_trainer.planning.train_memory import RankMemory, TrainMemory, largest

MOMENTS_BYTES = 8 * 2**27
"""Bytes of the moments of a group of parameters that step together: `megatron/grouped_step.py`."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: the decoder layers of its virtual stages, and the embedding or the output layer at an end of the model."""

    parts: tuple[range, ...]
    """Numbers of the decoder layers of each virtual stage, in the model, from 0."""
    is_first: bool
    is_last: bool
    begun: int
    """Maximum number of passes of a micro-batch through a virtual stage whose activations the stage holds at a time."""

    @property
    def layers(self) -> int:
        """Number of decoder layers of the stage."""
        return sum(map(len, self.parts))


def stages(layers: int, count: int, virtual: int = 1) -> list[Stage]:
    """Return the pipeline stages of a model. The layers are divided as in the engine (`engines/megatron/layout.py`).

    layers: number of decoder layers of the model. count: number of stages. virtual: number of virtual stages of each
    stage. If `virtual` does not divide `layers`, which the engine refuses, the virtual stages have different sizes.
    """
    blocks = [layers * (number + 1) // virtual - layers * number // virtual for number in range(virtual)]
    of_blocks = [_sizes(block, count) for block in blocks]
    listed = []
    for stage in range(count):
        starts = [sum(blocks[:number]) + sum(of_blocks[number][:stage]) for number in range(virtual)]
        parts = tuple(range(start, start + sizes[stage]) for start, sizes in zip(starts, of_blocks, strict=True))
        begun = count - stage if virtual == 1 else 2 * (count - stage - 1) + (virtual - 1) * count + 1
        listed.append(Stage(parts, stage == 0, stage == count - 1, begun))
    return listed


def _sizes(layers: int, stages: int) -> list[int]:
    """Divide consecutive layers over pipeline stages."""
    if layers % stages == 0:
        return [layers // stages] * stages
    if stages == 2:
        return [layers - layers // 2, layers // 2]
    middle = -(-layers // stages)
    if layers - middle * (stages - 2) < 2:
        middle -= 1
    rest = layers - middle * (stages - 2)
    return [rest - rest // 2, *[middle] * (stages - 2), rest // 2]


def stage_parameters(shape: ModelSizes, stage: Stage, *, with_head: bool = False, pictures: bool = False) -> Parameters:
    """Return the numbers of parameters of a stage that train, before tensor-parallel and expert-parallel ranks divide them.

    with_head: whether the last stage has the head for multi-token prediction. pictures: whether the vision tower trains.
    """
    held = Parameters()
    for part in stage.parts:
        held += parameters.layers(shape, part.start, len(part))
    if stage.is_first:
        held += parameters.embedding(shape)
        if pictures:
            held += Parameters(repeated=parameters.vision(shape))
    if stage.is_last:
        held += Parameters(repeated=shape.hidden)
        if not (shape.tied and stage.is_first):
            held += parameters.embedding(shape)
        if with_head:
            held += parameters.prediction_head(shape)
            if not stage.is_first:  # the head embeds tokens
                held += parameters.embedding(shape)
    return held


def rank_memory(
    shape: ModelSizes, spec: TrainingSpec, kernels: Kernels, *, on_cpu: bool = False, pictures: bool = False
) -> RankMemory:
    """Return the memory of a rank of the Megatron engine, on the pipeline stage that needs most at its peak.

    on_cpu: whether the rank runs without an accelerator. Then gloo's reduce-scatter copies the buffer of gradients.
    pictures: whether the data contain pictures, so that the vision tower trains.
    """
    cut = spec.train.parallelism
    all_stages = stages(shape.layers, cut.pipeline, cut.virtualPipeline)
    ranks = [_stage_memory(shape, spec, stage, kernels, on_cpu=on_cpu, pictures=pictures) for stage in all_stages]
    return max(ranks, key=lambda rank: rank.device.total)


def _stage_memory(
    shape: ModelSizes, spec: TrainingSpec, stage: Stage, kernels: Kernels, *, on_cpu: bool, pictures: bool
) -> RankMemory:
    cut, width = spec.train.parallelism, 2 if spec.model.precision == "BF16" else 4
    with_head = stage.is_last and spec.train.multiTokenPrediction is not None
    held, micro = stage_parameters(shape, stage, with_head=with_head, pictures=pictures), MicroBatchSize.of(spec)
    dense, experts = _on_rank(held, cut)
    frozen = parameters.vision(shape) if stage.is_first and not pictures else 0
    master = 4 if width == 2 else 0  # float32 parameters are their own master copies
    weights, offload = width * (dense + experts + frozen), spec.train.offload
    gradients = 4 * (dense + experts)
    optimizer = (master + 8) * (dense / spec.data_parallel + experts / spec.expert_data_parallel)
    reference = weights if spec.mode != "SFT" and spec.algorithm.kl.placement != "None" else 0.0
    # The trained model leaves the device for the reference model, and its memory in the host stays pinned.
    pinned = weights if offload.parameters and reference and not on_cpu else 0.0
    host = pinned + (optimizer if offload.optimizer else 0.0) + (reference if offload.parameters else 0.0)
    state = TrainMemory(
        parameters=weights,
        gradients=gradients,
        optimizer=0.0 if offload.optimizer else optimizer,
        reference=0.0 if offload.parameters else reference,
    )
    # Sequence parallelism divides what is between matrix products too, so every term is divided.
    length = micro.length + -micro.length % cut.tensor
    tokens = micro.tokens * length / micro.length / cut.tensor
    computation = Computation(width, kernels, tokens, length, expert_tensor=cut.expertTensor, by_megatron=True)
    full = sum((number + 1) % shape.full_attention_interval == 0 for part in stage.parts for number in part)
    recompute, virtual = spec.train.activationCheckpointing, cut.virtualPipeline
    begun = min(stage.begun, micro.count * virtual)
    of_stage = activations.stack(shape, computation, stage.layers + with_head, full + with_head, recompute=recompute)
    computed = activations.backward_temporaries(shape, computation)
    computed += activations.largest_layer(shape, computation) if recompute else 0.0
    kept = (of_stage - computed) / virtual
    largest_matrix = 4 * shape.vocabulary * shape.hidden / cut.tensor if stage.is_first or stage.is_last else 0.0
    shown, of_pictures = _tower(shape, spec, stage, micro) if pictures and stage.is_first else (0.0, 0.0)
    moments = {
        "backward pass of a layer": state.with_parts(activations=computed + begun * kept + shown),
        "backward pass of the vision tower": state.with_parts(activations=(begun - 1) * kept + shown + of_pictures),
    }
    if on_cpu:
        moments["sum of gradients"] = state.with_parts(gradients=state.gradients)
    if stage.is_last:
        head = head_memory.megatron(shape.vocabulary, shape.hidden, cut.tensor, micro.scored, width)
        if with_head:  # the head for multi-token prediction adds to the gradient of the output layer
            head += largest_matrix * width / 4
        moments["backward pass of the head"] = state.with_parts(activations=begun * kept + shown, head=head)
    if stage.is_first:
        moments["gradient of the table"] = state.with_parts(
            activations=(begun - 1) * kept + shown, head=largest_matrix * width / 4
        )
    if not on_cpu:
        twice = width * max(dense, experts) / cut.virtualPipeline
        moments["start"] = state.with_parts(parameters=twice, optimizer=-state.optimizer)
        joined = _joined_numbers(shape, cut, with_table=largest_matrix > 0)
        if spec.mode != "SFT":
            published = width * ((dense + frozen) / spec.data_parallel + experts / spec.expert_data_parallel)
            without = -gradients if offload.gradients else 0.0
            moments["publication"] = state.with_parts(gradients=without, published=published + width * joined)
        moments["checkpoint"] = state.with_parts(
            gradients=-gradients, optimizer=optimizer - state.optimizer, published=4 * joined + largest_matrix
        )
    if offload.optimizer and not on_cpu:  # on a CPU, what comes to the device leaves the host
        in_step = optimizer * master / (master + 8) + min(optimizer * 8 / (master + 8), MOMENTS_BYTES)
        moments["optimizer step"] = state.with_parts(optimizer=in_step)
    peak, memory = largest(moments)
    without_gradients = state.total - gradients  # a sleeping rank drops them
    between = without_gradients if offload.gradients else state.total
    return RankMemory(peak, memory, host, between, parked=without_gradients - pinned)


def _tower(shape: ModelSizes, spec: TrainingSpec, stage: Stage, micro: MicroBatchSize) -> tuple[float, float]:
    """Return the bytes of the vision tower's activations that the first stage keeps, and of those in the tower's backward pass.

    With virtual stages, the first of them computes two rounds of one micro-batch per stage before the first one comes back
    (megatron-core, `get_schedule_table`).
    """
    cut, tower = spec.train.parallelism, TowerActivations.of(shape, spec, micro, pictures=True)
    begun = min(micro.count, stage.begun if cut.virtualPipeline == 1 else 2 * cut.pipeline)
    return tower.kept * begun, tower.computed


def _joined_numbers(shape: ModelSizes, cut: ParallelismSpec, *, with_table: bool) -> float:
    """Return the number of values of the parts of the largest parameter and of the whole parameter, which exist together
    while a rank joins it.

    with_table: whether the stage has a table of tokens. A parameter that tensor-parallel ranks do not divide is copied once.
    """
    table = shape.vocabulary * shape.hidden * (2 if cut.tensor > 1 else 1) if with_table else 0
    # The experts one after the other, and all of them in one tensor.
    experts = 2 * 2 * shape.hidden * shape.expert_intermediate * shape.experts / cut.expert
    return max(table, experts)


def _on_rank(held: Parameters, cut: ParallelismSpec) -> tuple[float, float]:
    """Return (dense parameters, experts' parameters) of a stage on one rank."""
    return held.divided / cut.tensor + held.repeated, held.experts / (cut.expert * cut.expertTensor)
