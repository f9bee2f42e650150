"""Computes the size of vLLM's KV cache on the CPU, where all processes of a machine share the memory."""

from __future__ import annotations

import math

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.free_memory import free_memory
from qwen35_trainer.models.qwen3_5.classes import HFConfig, layer_types

ATTENTION_BLOCK = 128
"""Number of tokens. vLLM's CPU kernels store keys and values in blocks of a multiple of it."""
STATES_PER_SEQUENCE = 2
"""Number of blocks of a linear-attention layer per sequence: the present state, and one in the prefix cache."""
SPARE_BLOCKS = 64
UNUSED_BLOCKS = 1
"""Number of blocks that vLLM gives to no sequence: the first one (BlockPool.null_block)."""


class CacheTooSmall(RuntimeError):
    """One sequence of the maximum length does not fit into the memory for keys, values and states."""

    failure = FailureReason.OUT_OF_MEMORY


def cpu_cache_bytes(config: HFConfig, slots: int, max_length: int, fraction: float) -> int:
    """Return how many bytes vLLM gets for keys, values and states of `slots` sequences of `max_length` tokens.

    The result is at most `fraction` of the memory that is available now. If the sequences need more, vLLM lets some
    of them wait. In a hybrid model, all blocks of the cache have the same size: that of the state of a linear-attention
    layer, rounded up so that the keys and values of a multiple of ATTENTION_BLOCK tokens fill a block. In a model with
    full attention alone (Qwen3), a block has the keys and values of ATTENTION_BLOCK tokens in all layers. Raises
    CacheTooSmall, with the bytes that one sequence needs, if one sequence does not fit.
    """
    available = free_memory()
    least, needed = _needed(config, 1, max_length), _needed(config, slots, max_length)
    allowed = int(fraction * available)
    if allowed < least:
        raise CacheTooSmall(
            f"the KV cache of one sequence of {max_length} tokens needs {_gib(least)}, and rollout.memoryFraction {fraction:g} of the "
            f"{_gib(available)} that are available is {_gib(allowed)}. {_fix(least, available)}"
        )
    return min(needed, allowed)


def _fix(least: int, available: int) -> str:
    """Return what the user can change so that a cache of `least` bytes, which holds one sequence, fits into memory.

    available: bytes of memory that are available now.
    """
    if least < available:
        enough = math.ceil(100 * least / available) / 100
        return f"Raise rollout.memoryFraction to at least {enough:g}, or lower data.maxPromptTokens or data.maxResponseTokens."
    return "Give the pod more memory, or lower data.maxPromptTokens or data.maxResponseTokens."


def _needed(config: HFConfig, slots: int, max_length: int) -> int:
    text = config.get_text_config()
    kinds = layer_types(text)
    linear = kinds.count("linear_attention")
    full = len(kinds) - linear
    per_token = 2 * 2 * text.num_key_value_heads * text.head_dim  # key and value, in bfloat16
    if not linear:
        blocks = slots * -(-max_length // ATTENTION_BLOCK) + UNUSED_BLOCKS
        return int(blocks * full * ATTENTION_BLOCK * per_token)
    keys, values = (
        heads * size
        for heads, size in (
            (text.linear_num_key_heads, text.linear_key_head_dim),
            (text.linear_num_value_heads, text.linear_value_head_dim),
        )
    )
    # The state is float32, the inputs of the convolution are bfloat16.
    state = 4 * values * text.linear_key_head_dim + 2 * (2 * keys + values) * (text.linear_conv_kernel_dim - 1)
    tokens = -(-state // (per_token * ATTENTION_BLOCK)) * ATTENTION_BLOCK
    blocks = slots * (STATES_PER_SEQUENCE * linear + full * -(-max_length // tokens)) + SPARE_BLOCKS
    return int(blocks * tokens * per_token)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
