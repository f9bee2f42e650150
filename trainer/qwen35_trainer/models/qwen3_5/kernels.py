"""Accelerator kernels that take the boundaries of the sequences in a packed row. They are imported when first used.

    operation          kernel                                                     devices, all 16-bit only
    convolution        flash-linear-attention (`fla`)                             those that `fla` supports
    gated delta rule   flash-linear-attention (`fla`)                             those that `fla` supports
    full attention     torch.nn.attention.varlen (FlashAttention within torch)    NVIDIA

flash-linear-attention takes boundaries in int64, and divides them into chunks on the host. It remembers the result by the identity
of the tensor, so all layers of a forward pass must pass the same object.

All kernels are optional: without them, a packed row is split (`buckets.py`). Nothing in this file has run on an
accelerator. The numeric check after loading (`packing.py`) detects wrong results.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version
from torch import Tensor

logger = logging.getLogger(__name__)

HALF_PRECISIONS = (torch.bfloat16, torch.float16)
MIN_FLASH_LINEAR_ATTENTION_VERSION = Version("0.5.1")
"""The first version that computes correct gradients for equal numbers of key and value heads.

It also accepts fewer key heads than value heads."""


@cache
def _has_flash_linear_attention() -> bool:
    """Whether a usable version of fla-core is installed, the distribution that
    contains flash-linear-attention's kernels.
    """
    try:
        installed = version("fla-core")
    except PackageNotFoundError:
        return False
    if Version(installed) < MIN_FLASH_LINEAR_ATTENTION_VERSION:
        logger.warning(
            "fla-core %s is not used: its gradients may be wrong; install %s or newer",
            installed,
            MIN_FLASH_LINEAR_ATTENTION_VERSION,
        )
        return False
    return True


def has_delta_rule(x: Tensor) -> bool:
    """Whether `delta_rule` and `convolution` accept tensors like `x`.

    The result is False on a CPU, because every call of `fla` fails there, even if Triton is installed and `fla` can be
    imported. The result is also False for float32, which `fla` rejects.
    """
    return x.device.type != "cpu" and x.dtype in HALF_PRECISIONS and _has_flash_linear_attention()


def convolution(x: Tensor, filters: Tensor, boundaries: Tensor | None) -> Tensor:
    """Compute the short convolution and silu (`convolution.convolve`) with flash-linear-attention.

    x: (n, L, C), n right-padded sequences of L tokens with C channels, or (1, T, C), a packed row of T tokens with
    `boundaries` (sequences + 1,) int64. filters: (C, width). The result has the shape of `x`.
    """
    fla = import_module("fla.modules.convolution")
    output: Tensor = fla.causal_conv1d(x.contiguous(), filters.contiguous(), activation="silu", cu_seqlens=boundaries)[
        0
    ]
    return output


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, boundaries: Tensor | None
) -> Tensor:
    """Compute the outputs of the gated delta rule (`delta_rule.chunked`) with flash-linear-attention.

    query, key: (n, L, G, K). value: (n, L, H, V). log_decay, beta: (n, L, H). G key heads of K channels, H ≥ G
    value heads of V channels; n right-padded sequences of L tokens, or one packed row with `boundaries`, (sequences + 1,)
    int64. Returns (n, L, H, V).
    """
    fla = import_module("fla.ops.gated_delta_rule")
    output: Tensor = fla.chunk_gated_delta_rule(
        query,
        key,
        value,
        g=log_decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=boundaries,
    )[0]
    return output


def delta_rule_from(
    state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    boundaries: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of a packed row with flash-linear-attention, from a given state of each sequence.

    state: (sequences, H, K, V) float32 before the first position of each sequence; None: zeros. All other shapes are those
    of `delta_rule`. Returns the outputs (1, T, H, V), and the states after the last positions (sequences, H, K, V). Both
    have gradients, and so has `state`.
    """
    fla = import_module("fla.ops.gated_delta_rule")
    output, last = fla.chunk_gated_delta_rule(
        query,
        key,
        value,
        g=log_decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=boundaries,
    )
    return output, last


def has_varlen_attention(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in HALF_PRECISIONS


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    key_boundaries: Tensor | None = None,
    longest_keys: int | None = None,
) -> Tensor:
    """Compute causal attention within each sequence of a packed row of T tokens.

    query, key, value, and the result: (1, T, heads, channels). boundaries: (sequences + 1,) int32 cumulative lengths.
    longest: maximum length of a sequence. key_boundaries, longest_keys: the same for keys and values, if each sequence
    has keys and values of earlier tokens before its own; its last query then reads all of its keys.
    """
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query[0],
        key[0],
        value[0],
        boundaries,
        boundaries if key_boundaries is None else key_boundaries,
        longest,
        longest if longest_keys is None else longest_keys,
        window_size=(-1, 0),
        enable_gqa=query.shape[2] != key.shape[2],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)
