"""Bytes of the activations that a backward pass needs, and of the temporaries that exist with them.

Each term is a tensor that autograd saves in the layer's code (`models/qwen3_5/`). A number has c bytes in the model's
precision, and 4 in float32. CPUs and NPUs use the kernels "Torch". With these kernels, the delta rule also keeps several
matrices of positions × positions for each chunk, and norms also keep their normalised inputs.

    full attention   q, k, v, output, softmax statistics: flash attention keeps no matrix of positions (arXiv:2205.14135)
    delta rule       chunks of 64 positions (arXiv:2412.06464); flash-linear-attention keeps q, k, v, the gates and one matrix per chunk
    recomputation    the input of every layer, and all activations of the layer whose backward pass runs (activation
                     checkpointing, arXiv:1604.06174)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from qwen35_trainer.catalog.model_sizes import ModelSizes

Kernels = Literal["Fused", "Torch"]
CHUNK_POSITIONS: Final = 64
"""Number of positions in a chunk of the delta rule, in `delta_rule.CHUNK_POSITIONS` and in flash-linear-attention."""


@dataclass(frozen=True)
class Computation:
    """The numbers that, together with the model's sizes, decide the bytes of a micro-batch's activations on one rank."""

    width: int
    """Bytes of a number in the model's precision: 2 for bfloat16, 4 for float32."""
    kernels: Kernels
    """"Fused": Triton kernels and flash attention. "Torch": torch's operations."""
    tokens: float
    """Number of tokens of the micro-batch that this rank holds, with padding."""
    length: float
    """Number of positions of a sequence over which attention and the delta rule run, with padding. Context parallelism
    does not divide it: in these layers a rank has all positions of some heads."""
    tensor: int = 1
    """Number of tensor-parallel ranks that divide heads and channels inside a layer. 1 if `tokens` is already
    divided by them (sequence parallelism)."""
    expert_tensor: int = 1
    """Number of ranks that divide the matrix products of each expert. Each of them has the routed tokens of all of them."""
    context: int = 1
    """Number of context-parallel ranks. The functions here do not divide by it, because `tokens` is already divided."""
    by_megatron: bool = False
    """Whether megatron-core's layers compute. Its MLP adds an offset of 0 to a half of its input, which makes a copy, keeps the
    product of an expert before and after the router's weight, and its output gate keeps a sigmoid in float32."""
    weights_train: bool = True
    """Whether the model's own weights train. With adapters (LoRA) they do not, so what only their gradients need is not saved: the
    normalised input of a norm, the router's input in float32, and the inputs of the experts' matrix products."""


def _norm(computation: Computation, channels: float, groups: float) -> float:
    """Return the bytes per token that an RMS norm in float32 saves, without its output.

    channels: numbers per token. groups: number of RMS values per token. The norm saves its input and 1 / RMS; torch's
    operations also save the normalised input, for the gradient of the weight.
    """
    normalised = 4 if computation.kernels == "Torch" and computation.weights_train else 0
    return (4 + normalised) * channels + 4 * groups


def full_attention(shape: ModelSizes, computation: Computation) -> float:
    """Return the bytes of activations that the attention of a full-attention layer saves,
    without the layer's norm before it.
    """
    c, parts = computation.width, computation.tensor
    query, key = shape.query / parts, shape.key_value / parts
    heads, key_heads = shape.heads / parts, shape.kv_heads / parts
    norms = _norm(computation, query, heads) + _norm(computation, key, key_heads)
    if c == 4 and shape.output_gate:
        norms += 4 * query  # in float32 the norm keeps the product itself, with the gate
    mixed = c * (query + 2 * key) + c * query + 4 * heads
    gate = (4 if computation.by_megatron else c) * query if shape.output_gate else 0
    return computation.tokens * (norms + mixed + gate + c * query)


def linear_attention(shape: ModelSizes, computation: Computation) -> float:
    """Return the bytes of activations that a Gated DeltaNet saves, without the layer's norm before it."""
    c, parts = computation.width, computation.tensor
    heads, values = shape.linear_value_heads / parts, shape.linear_values / parts
    mixed = (2 * shape.linear_keys + shape.linear_values) / parts
    keys = heads * shape.linear_key_dim  # repeated for each value head
    gates, closing = 12 * heads, _norm(computation, values, heads) + 12 * values + c * values
    if computation.kernels == "Fused":
        rule = c * (2 * keys + values) + 8 * heads + c * CHUNK_POSITIONS * heads + 8 * heads
        return computation.tokens * (gates + c * mixed + rule + closing)
    chunk = min(CHUNK_POSITIONS, computation.length)
    chunks = -(-computation.length // chunk)
    padded = chunks * chunk / computation.length
    state = 4 * keys * shape.linear_value_dim / chunk
    later = (chunks - 1) / chunks
    within = 5 * 4 * heads * chunk + 4 * (7 * keys) + 4 * (keys + values) + 12 * heads
    value = 4 * values if c == 2 else 4 * mixed
    between = state + 4 * values + 12 * keys * later
    rule = 8 * keys + 8 * heads + padded * (within + between) + value
    return computation.tokens * (gates + c * mixed + rule + closing)


def feed_forward(shape: ModelSizes, computation: Computation) -> float:
    """Return the bytes of activations that the MLP of a layer saves, without the norm before it.

    In a mixture-of-experts model, the router and the experts are counted instead of the MLP.
    """
    c, parts, hidden = computation.width, computation.tensor, shape.hidden
    # Two halves of the input, the activated half, and the product; with megatron-core its copies (`by_megatron`).
    kept, kept_of_expert = (5, 6) if computation.by_megatron else (4, 4)
    if not shape.experts:
        return computation.tokens * kept * c * shape.intermediate / parts
    per_token, width, trains = shape.experts_per_token, shape.expert_intermediate, computation.weights_train
    router = (4 * hidden if c == 2 and trains else 0) + 4 * shape.experts + 20 * per_token + 4
    shared = c * (1 + kept * shape.shared_intermediate / parts + hidden) if shape.shared_intermediate else 0
    # The tokens are gathered from all ranks of an expert, and each rank has its part of the channels between the products.
    outside, inside = (2, kept_of_expert) if trains else (1, kept_of_expert - 1)
    experts = per_token * (computation.expert_tensor * (outside * c * hidden + 28) + inside * c * width)
    return computation.tokens * (router + shared + experts)


def layer(shape: ModelSizes, computation: Computation, *, linear: bool) -> float:
    """Return the bytes of activations that a decoder layer saves for its backward pass.

    linear: whether the layer is a Gated DeltaNet layer; otherwise it has full attention.
    """
    c, hidden = computation.width, shape.hidden
    norms = 2 * (_norm(computation, hidden, 1) + c * hidden)
    mixer = linear_attention if linear else full_attention
    return computation.tokens * norms + mixer(shape, computation) + feed_forward(shape, computation)


def largest_layer(shape: ModelSizes, computation: Computation) -> float:
    """Return the bytes of activations of the largest decoder layer: a full-attention or a Gated DeltaNet layer."""
    kinds = ({True} if shape.linear_layers else set()) | ({False} if shape.full_layers else set())
    return max(layer(shape, computation, linear=kind) for kind in kinds)


def backward_temporaries(shape: ModelSizes, computation: Computation) -> float:
    """Return the bytes of gradients at the beginning of a layer's backward pass, when all
    activations of the layer still exist.
    """
    c, parts = computation.width, computation.tensor
    width = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate / parts
    inner = (shape.intermediate / parts) if not shape.experts else width
    return computation.tokens * (3 * c * inner + 2 * c * shape.hidden)


def layer_input(shape: ModelSizes, computation: Computation) -> float:
    """Return the bytes of the input of a decoder layer."""
    return computation.tokens * computation.width * shape.hidden


def stack(shape: ModelSizes, computation: Computation, layers: int, full_layers: int, *, recompute: bool) -> float:
    """Return the bytes of activations and temporaries of `layers` decoder layers at the peak of their
    backward pass, for one micro-batch.

    full_layers: number of the layers that have full attention. recompute: whether the backward pass computes each layer
    again from its saved input (activation checkpointing).
    """
    temporaries = backward_temporaries(shape, computation)
    if recompute:
        return layers * layer_input(shape, computation) + largest_layer(shape, computation) + temporaries
    full = layer(shape, computation, linear=False) if full_layers else 0.0
    linear = layer(shape, computation, linear=True) if layers > full_layers else 0.0
    saved = full_layers * full + (layers - full_layers) * linear - _without_gradient(shape, computation)
    return saved + temporaries


def _without_gradient(shape: ModelSizes, computation: Computation) -> float:
    """Return how many bytes fewer the first layer saves than others if only adapters train.

    Its input, and the gates of its Gated DeltaNet, which have no adapters by default, depend on no parameter that trains. So its
    first norm saves nothing, and the delta rule saves neither the two products of keys and queries that it multiplies by decays,
    nor the queries and keys that it multiplies by gates.
    """
    if computation.weights_train:
        return 0.0
    norm = _norm(computation, shape.hidden, 1)
    if computation.kernels == "Fused" or not shape.linear_layers:
        return computation.tokens * norm
    chunk = min(CHUNK_POSITIONS, computation.length)
    padded = -(-computation.length // chunk) * chunk / computation.length
    heads = shape.linear_value_heads / computation.tensor
    gated = 2 * 4 * heads * chunk + 3 * 4 * heads * shape.linear_key_dim
    return computation.tokens * (norm + padded * gated)
