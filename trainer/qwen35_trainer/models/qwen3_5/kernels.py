"""Accelerator kernels that take the boundaries of the sequences in a packed row. They are imported when first used.

    operation          kernel                                                     devices, all 16-bit only
    convolution        flash-linear-attention (`fla`)                             those that `fla` supports
    gated delta rule   flash-linear-attention (`fla`)                             those that `fla` supports
    full attention     torch.nn.attention.varlen (FlashAttention within torch)    NVIDIA

All kernels are optional: without them, a packed row is split (`sequence_layout.py`). Nothing in this file has run on an
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
    `boundaries`. filters: (C, width). The result has the shape of `x`.
    """
    fla = import_module("fla.modules.convolution")
    cu_seqlens = None if boundaries is None else boundaries.long()
    output: Tensor = fla.causal_conv1d(x.contiguous(), filters.contiguous(), activation="silu", cu_seqlens=cu_seqlens)[
        0
    ]
    return output


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, boundaries: Tensor | None
) -> Tensor:
    """Compute the outputs of the gated delta rule (`delta_rule.chunked`) with flash-linear-attention.

    query, key: (n, L, G, K). value: (n, L, H, V). log_decay, beta: (n, L, H). G key heads of K channels, H ≥ G
    value heads of V channels; n right-padded sequences of L tokens, or one packed row with `boundaries`.
    Returns (n, L, H, V).
    """
    fla = import_module("fla.ops.gated_delta_rule")
    output: Tensor = fla.chunk_gated_delta_rule(
        query,
        key,
        value,
        g=log_decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if boundaries is None else boundaries.long(),
    )[0]
    return output


def has_varlen_attention(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in HALF_PRECISIONS


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """Compute causal attention within each sequence of a packed row of T tokens.

    query, key, value, and the result: (1, T, heads, channels). boundaries: (sequences + 1,) int32 cumulative lengths.
    longest: maximum length of a sequence.
    """
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query[0],
        key[0],
        value[0],
        boundaries,
        boundaries,
        longest,
        longest,
        window_size=(-1, 0),
        enable_gqa=query.shape[2] != key.shape[2],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)
