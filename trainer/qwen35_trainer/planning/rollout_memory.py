"""The memory of a device of a rollout replica: weights, and what each sequence keeps.

    weights        in bfloat16, with the Torch engine in the model's precision; matrices, experts and tables are divided over
                   the replica's devices (`weights/qwen3_5_divisions.py`)
    KV cache       keys and values: 2 · heads · channels numbers for each token and full-attention layer; each device has at least one head
    states         a Gated DeltaNet layer keeps a float32 matrix for each head, and its last inputs, whatever the length of the
                   sequence; vLLM keeps them twice for its prefix cache
    workspace      logits of a step in float32, and the activations of the step's tokens

    graphs         what the libraries of the process take, and the CUDA graphs of vLLM: counted only in the check of `graph_sequences`

vLLM takes `rollout.memoryFraction` of the device. Sequences get the part that weights and workspace leave, and sequences
that do not fit wait. The Torch engine reserves the maximum length for every slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.manifest.vllm import VLLMSpec
from qwen35_trainer.planning import parameters

PAGE_TOKENS = 16
"""Tokens of the smallest block of vLLM's cache on CUDA devices, of which a page has a multiple (`CacheConfig.DEFAULT_BLOCK_SIZE`)."""
GRAPH_BYTES = 2 * 2**30
"""Assumed bytes that vLLM takes from its share of a device for libraries and CUDA graphs (`determine_available_memory` in
vllm/v1/worker/gpu_worker.py subtracts both)."""


@dataclass(frozen=True)
class ReplicaMemory:
    """The memory of one device of a replica, in bytes."""

    weights: float
    workspace: float
    per_sequence: float
    """Bytes of keys, values and states of a sequence of the maximum length."""
    fixed_per_sequence: float
    """The part of `per_sequence` that does not depend on the length: the states."""
    slots: int
    """Maximum number of sequences at a time: rollout.maxSequencesPerReplica."""
    available: float
    """Bytes that the engine may take; infinity if the device is not known."""
    reserves: bool
    """Whether the engine reserves the maximum length for all slots when it starts."""
    graph_block: float | None = None
    """Bytes of a block of vLLM's cache, of which each sequence needs one before vLLM records CUDA graphs: a page in every layer of a
    group. None: no such blocks are needed."""

    @property
    def graph_sequences(self) -> int | None:
        """Number of sequences for which vLLM has blocks when it records CUDA graphs; None if any number of slots is allowed.

        vLLM does not start if it is less than `slots` (`resolve_cudagraph_mode_and_sizes` in vllm/config/compilation.py).
        """
        if self.graph_block is None or math.isinf(self.for_sequences):
            return None
        return max(0, int((self.for_sequences - GRAPH_BYTES) // self.graph_block))

    @property
    def for_sequences(self) -> float:
        """Bytes that weights and workspace leave for sequences; negative if these two do not fit."""
        return self.available - self.weights - self.workspace

    @property
    def fitting(self) -> int:
        """Number of sequences of the maximum length that fit at a time, at most `slots`."""
        if math.isinf(self.for_sequences):
            return self.slots
        return max(0, min(self.slots, int(self.for_sequences // self.per_sequence)))

    @property
    def cache(self) -> float:
        """Bytes of keys, values and states: for all slots if the engine reserves them, otherwise for the sequences that fit."""
        return self.per_sequence * (self.slots if self.reserves else self.fitting)

    @property
    def total(self) -> float:
        """Bytes of weights, workspace and sequences."""
        return self.weights + self.workspace + self.cache


def rank_weights(shape: ModelSizes, devices: int, width: int) -> float:
    """Return the bytes of weights on one device of a replica.

    devices: number of devices of the replica. width: bytes of each weight.
    """
    text = parameters.text(shape)
    return width * ((text.divided + text.experts + parameters.vision(shape)) / devices + text.repeated)


def cache_per_token(shape: ModelSizes, devices: int, width: float) -> float:
    """Return the bytes of keys and values (KV cache) of one token on one device of a replica.

    devices: number of devices of the replica. width: bytes of each number in the cache.
    """
    heads = max(1.0, shape.kv_heads / devices)
    return 2 * width * heads * shape.head_dim * shape.full_layers


def state(shape: ModelSizes, devices: int) -> float:
    """Return the bytes of the Gated DeltaNet states of one sequence on one device of a replica.

    devices: number of devices of the replica.
    """
    mixed = 2 * shape.linear_keys + shape.linear_values
    inputs = 2 * mixed * (shape.linear_filter - 1)
    return shape.linear_layers * (4 * shape.linear_values * shape.linear_key_dim + inputs) / devices


OTHER_BLOCKS: Final = frozenset(
    ("compilation_config", "optimization_level", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "block_size")
)
"""Arguments of vLLM that change blocks of its cache or its CUDA graphs in ways that a plan does not know."""


def graph_block(shape: ModelSizes, spec: TrainingSpec, cache_width: float) -> float | None:
    """Return the bytes of a block of vLLM's cache on one device; None if vLLM starts with any number of slots.

    Only models with Gated DeltaNet layers on NVIDIA devices need a block for each sequence, and only with CUDA graphs of whole steps. A page
    holds the state of one Gated DeltaNet layer, or keys and values of one attention layer for as many tokens as have that size,
    in multiples of PAGE_TOKENS (`_align_hybrid_block_size` in vllm/platforms/interface.py). A block has a page for each layer of a
    group, and groups have as many layers as there are attention layers (`kv_cache_utils.py`).
    """
    pool = spec.rollout
    if pool is None or pool.engine != "VLLM" or spec.accelerator.profile != "NVIDIA" or not shape.linear_layers:
        return None
    if pool.vllm is not None and (pool.vllm.eager or OTHER_BLOCKS & pool.vllm.extraArguments.keys()):
        return None
    layers = min(shape.full_layers, shape.linear_layers)
    if layers == 0:
        return None
    tokens = PAGE_TOKENS * cache_per_token(shape, pool.tensorParallel, cache_width) / shape.full_layers
    page = tokens * math.ceil(state(shape, pool.tensorParallel) / shape.linear_layers / tokens)
    return layers * page


def replica_memory(shape: ModelSizes, spec: TrainingSpec, device_memory: float) -> ReplicaMemory:
    """Return the memory of one device of a replica.

    Replicas of the straggler lane, which generate long responses on more devices each, are not considered.
    device_memory: bytes of the device; infinity if it is not known. The spec must have a rollout pool.
    """
    pool, data = spec.rollout, spec.data
    assert pool is not None
    devices, vllm = pool.tensorParallel, pool.engine == "VLLM"
    width = 2 if vllm or spec.model.precision == "BF16" else 4
    options = pool.vllm
    cache_width = 1 if options is not None and options.kvCachePrecision == "FP8" else width
    length = data.maxPromptTokens + data.maxResponseTokens
    states = 2 if vllm and (options is None or options.prefixCache) else 1
    fixed = states * state(shape, devices)
    on_cpu = spec.accelerator.profile == "CPU"
    tokens = (options or VLLMSpec()).step_tokens(pool.maxSequencesPerReplica, on_cpu=on_cpu)
    step = tokens if vllm else max(pool.maxSequencesPerReplica, data.maxPromptTokens)
    inner = shape.intermediate or shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    logits = 4 * pool.maxSequencesPerReplica * shape.vocabulary * (1 if vllm else 2)
    workspace = logits + 2 * width * step * (2 * shape.hidden + 2 * inner / devices)
    return ReplicaMemory(
        rank_weights(shape, devices, width),
        workspace,
        fixed + length * cache_per_token(shape, devices, cache_width),
        fixed,
        pool.maxSequencesPerReplica,
        device_memory * (pool.memoryFraction if vllm else 1.0),
        reserves=not vllm,
        graph_block=graph_block(shape, spec, cache_width),
    )
