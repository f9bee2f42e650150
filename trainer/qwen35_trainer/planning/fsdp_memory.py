"""The memory of a rank of the FSDP engine.

Parameters, optimizer state and gradients are sharded over the ranks of a copy of the model
(ZeRO-3, arXiv:1910.02054, section 5).

    parameters        float32 master weights of what trains; frozen parameters in the model's precision
    optimizer state   float32: AdamW keeps two moments (running means) of the gradient for each trained parameter, and Muon keeps
                      one. With Muon, the tables and parameters that are not matrices train with AdamW. Of these, only the second
                      moments of the tables and of the last norm are counted
    gradients         float32; they exist from the end of the first backward pass of an update to its optimizer step
    gathered          all-gathered parameters: the tables (token embedding and output layer) from the forward pass to the end of
                      the backward pass, and two layers at a time: the one that computes and the next one. A layer is
                      resharded after use (torch.distributed.fsdp, `_fsdp_param_group.py`). Without
                      `spec.train.reshardAfterForward`, all layers stay gathered from their forward to their backward pass.
                      With an expert mesh, a rank gathers only its part of a layer's experts. Their shards have the same
                      size as without it
    gradient sums     a float32 copy of the gradient of one FSDP unit for the reduce-scatter (`_fsdp_collectives.foreach_reduce`)

The peak is at one of five moments: the backward pass of the head, the backward pass of a layer, that of the vision tower, the
reduce-scatter of the tables' gradients at the end of the backward pass, or the optimizer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import activations, head_memory, parameters, pinned_memory
from qwen35_trainer.planning.activations import Computation, Kernels
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize
from qwen35_trainer.planning.tower_activations import TowerActivations
from qwen35_trainer.planning.train_memory import RankMemory, TrainMemory, largest


@dataclass(frozen=True)
class _Sizes:
    """Numbers of parameters of the whole model."""

    trained: float
    frozen: float
    outermost: float
    """Number of parameters of the outermost FSDP unit, which is gathered during the whole pass: the
    tables of tokens and the last norm."""
    outermost_trained: float
    """The part of `outermost` that trains."""
    layer: float
    """Number of parameters of the largest layer without its experts."""
    experts: float
    """Number of parameters of the experts of that layer that a rank gathers, separately from the rest of the layer."""
    all: float
    gathered: float
    """Number of parameters that a rank gathers if no layer is freed: `all`, without the experts of other ranks."""

    @classmethod
    def of(cls, shape: ModelSizes, spec: TrainingSpec, *, pictures: bool) -> _Sizes:
        text, tower = parameters.text(shape).total, parameters.vision(shape)
        tables = parameters.embedding(shape).total * (1 if shape.tied else 2)
        kinds = [kind for kind, count in ((True, shape.linear_layers), (False, shape.full_layers)) if count]
        largest_layer = max((parameters.layer(shape, linear=kind) for kind in kinds), key=lambda each: each.total)
        frozen_parts, outermost = set(spec.train.freeze), tables + shape.hidden
        parts = spec.train.parallelism.expert
        elsewhere = parameters.text(shape).experts * (1 - 1 / parts)
        if spec.train.lora is not None:
            adapters = adapter_parameters(shape, spec.train.lora.rank, spec.train.lora.targets)
            return cls(
                adapters,
                text + tower,
                outermost,
                0,
                largest_layer.total - largest_layer.experts,
                largest_layer.experts / parts,
                text + tower + adapters,
                text + tower + adapters - elsewhere,
            )
        frozen = tower if "Vision" in frozen_parts or not pictures else 0
        if "Embeddings" in frozen_parts:
            frozen += tables
        if "Router" in frozen_parts:
            frozen += shape.layers * shape.hidden * (shape.experts + (1 if shape.shared_intermediate else 0))
        return cls(
            text + tower - frozen,
            frozen,
            outermost,
            shape.hidden if "Embeddings" in frozen_parts else outermost,
            largest_layer.total - largest_layer.experts,
            largest_layer.experts / parts,
            text + tower,
            text + tower - elsewhere,
        )


@dataclass(frozen=True)
class _OffloadedInputs:
    """The inputs of layers, or of blocks of the vision tower, that are offloaded with `offload.activations`, in bytes."""

    moved: float
    """Bytes that leave the device: all inputs but that of the layer whose backward pass runs."""
    host: float
    """Bytes in host memory: all inputs, each in a pinned block, whose size PyTorch rounds up to a power of two (docs of
    torch.cuda.host_memory_stats). On a CPU, nothing moves."""

    @classmethod
    def of(cls, spec: TrainingSpec, layers: int, each: float) -> _OffloadedInputs:
        """layers: number of layers. each: bytes of the input of one of them."""
        if not (spec.train.offload.activations and each):
            return cls(0.0, 0.0)
        moved = (layers - 1) * each
        on_cpu = spec.accelerator.profile == "CPU"
        return cls(moved, moved if on_cpu else layers * 2.0 ** math.ceil(math.log2(each)))


def adapter_parameters(shape: ModelSizes, rank: int, targets: tuple[str, ...]) -> int:
    """Return the number of parameters of all LoRA adapters.

    rank: rank of the adapters. targets: names of the linear layers that have an adapter.
    """
    gate = 2 if shape.output_gate else 1
    mixed = 2 * shape.linear_keys + shape.linear_values
    width = shape.intermediate or shape.shared_intermediate
    sizes = {
        "q_proj": (shape.full_layers, shape.hidden + gate * shape.query),
        "k_proj": (shape.full_layers, shape.hidden + shape.key_value),
        "v_proj": (shape.full_layers, shape.hidden + shape.key_value),
        "o_proj": (shape.full_layers, shape.hidden + shape.query),
        "in_proj_qkv": (shape.linear_layers, shape.hidden + mixed),
        "in_proj_z": (shape.linear_layers, shape.hidden + shape.linear_values),
        "out_proj": (shape.linear_layers, shape.hidden + shape.linear_values),
        "gate_proj": (shape.layers, shape.hidden + width),
        "up_proj": (shape.layers, shape.hidden + width),
        "down_proj": (shape.layers, shape.hidden + width),
    }
    return rank * sum(count * size for name, (count, size) in sizes.items() if name in targets)


def _rounding(shape: ModelSizes, spec: TrainingSpec, width: int) -> float:
    """Return by which factor offloaded parameters of `width` bytes are larger in the host: 1 on CPUs, where nothing is pinned."""
    if spec.accelerator.profile == "CPU":
        return 1.0
    cut = spec.train.parallelism
    return pinned_memory.rounding(shape, spec.world_size // cut.copies, width, cut.expert)


def rank_memory(shape: ModelSizes, spec: TrainingSpec, kernels: Kernels, *, pictures: bool) -> RankMemory:
    """Return the memory of a rank of the FSDP engine, at its peak and between two updates.

    pictures: whether the data contain pictures. Without pictures the vision tower does not train, so it has
    no gradients, no optimizer state and no activations.
    """
    train, width = spec.train, 2 if spec.model.precision == "BF16" else 4
    sizes, ranks = _Sizes.of(shape, spec, pictures=pictures), spec.world_size // spec.train.parallelism.copies
    micro = MicroBatchSize.of(spec)
    # Muon keeps one for each matrix.
    moments = 2 * sizes.trained if train.optimizer.type == "AdamW" else sizes.trained + sizes.outermost_trained
    weights = (4 * sizes.trained + width * sizes.frozen) / ranks
    gradients, optimizer = 4 * sizes.trained / ranks, 4 * moments / ranks
    uses_kl = spec.mode != "SFT" and spec.algorithm.kl.placement != "None" and train.lora is None
    reference = width * sizes.all / ranks if uses_kl else 0.0
    on_host = train.offload.parameters
    parked = train.offload.optimizer and not on_host
    state = TrainMemory() if on_host else TrainMemory(weights, 0, 0 if parked else optimizer, reference)
    held = state.with_parts(gradients=0 if on_host or micro.count == 1 else gradients)
    parts = train.parallelism.context
    computation = Computation(
        width, kernels, micro.tokens / parts, micro.length, context=parts, weights_train=train.lora is None
    )
    stack = activations.stack(
        shape, computation, shape.layers, shape.full_layers, recompute=train.activationCheckpointing
    )
    offloaded = _OffloadedInputs.of(spec, shape.layers, activations.layer_input(shape, computation))
    stack -= offloaded.moved
    kept = stack - activations.backward_temporaries(shape, computation)
    if train.activationCheckpointing:
        kept -= activations.largest_layer(shape, computation)
    tower = TowerActivations.of(shape, spec, micro, pictures=pictures)
    blocks = shape.vision.depth if shape.vision is not None else 0
    of_tower = _OffloadedInputs.of(spec, blocks, tower.block_input)
    of_pictures, block = tower.kept - of_tower.moved, parameters.vision(shape) / max(1, blocks)
    # The tower follows the layers of text. Its own gradients, and those of the tables, come last.
    later = parameters.vision(shape) + sizes.outermost_trained
    of_layers = 0.0 if on_host else max(held.gradients, 4 * (sizes.trained - later) / ranks)
    unit, largest_unit = sizes.layer + sizes.experts, max(sizes.layer, sizes.experts)
    trained_unit = 0 if train.lora is not None else largest_unit
    table_trains = sizes.outermost_trained > shape.hidden
    table = width * parameters.embedding(shape).total if table_trains else 0
    last = gradients if not on_host else 0.0
    # In the backward pass of the head, and of the last layer.
    around_head, around_layer = sizes.outermost, sizes.outermost + unit + largest_unit
    if not train.reshardAfterForward:
        around_head = around_layer = sizes.gathered
    candidates = {
        "backward pass of the head": held.with_parts(
            gathered=width * around_head,
            activations=kept + of_pictures,
            head=head_memory.fsdp(
                shape.vocabulary,
                shape.hidden,
                micro.scored / parts,
                width,
                kernels,
                float32_logits=train.headPrecision == "FP32",
                weight_trains=table_trains,
            ),
        ),
        "backward pass of a layer": held.with_parts(
            gathered=width * around_layer + table + (4 + width) * trained_unit,
            activations=stack + of_pictures,
        ),
        "backward pass of the vision tower": state.with_parts(
            gradients=of_layers,
            gathered=width * sizes.outermost + table + (2 * width + 4) * block if of_pictures else 0.0,
            activations=of_pictures + tower.computed,
        ),
        "sum of the tables' gradients": state.with_parts(
            gradients=last, gathered=(width + 4 + 4 / ranks) * sizes.outermost_trained + 4 * trained_unit
        ),
        "optimizer step": state.with_parts(gradients=last, optimizer=optimizer if parked else 0),
    }
    peak, memory = largest(candidates)
    host = offloaded.host + of_tower.host + (optimizer if on_host or parked else 0.0)
    if on_host:
        exact, narrow = (_rounding(shape, spec, each) for each in (4, width))
        # The trained weights are as large as their gradients.
        host += 2 * gradients * exact + (width * sizes.frozen / ranks + reference) * narrow
    return RankMemory(peak, memory, host, state.total, parked=state.total)
