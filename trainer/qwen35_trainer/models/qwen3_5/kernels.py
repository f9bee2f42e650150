"""Kernels for accelerators that take the boundaries of the sequences in a packed row. Imported when first used.

    convolution, gated delta rule   flash-linear-attention (`fla`), any accelerator that it supports, 16-bit
    full attention                  torch.nn.attention.varlen (FlashAttention within torch), NVIDIA, 16-bit

All are optional: without them a packed row is split (`sequence_layout.py`). Nothing in this file has run on hardware; the
numeric check after loading (`packing.py`) detects wrong results.
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

It also accepts fewer key heads.
"""


@cache
def _has_flash_linear_attention() -> bool:
    """Whether a usable version of fla-core, the distribution with flash-linear-attention's kernels, is installed."""
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
    imported. It is also False for float32, which `fla` rejects.
    """
    return x.device.type != "cpu" and x.dtype in HALF_PRECISIONS and _has_flash_linear_attention()


def convolution(x: Tensor, filters: Tensor, boundaries: Tensor | None) -> Tensor:
    """Compute `convolution.convolve` of (n, L, C) right-padded sequences or of a packed row (1, T, C).  filters: (C, W)."""
    fla = import_module("fla.modules.convolution")
    cu_seqlens = None if boundaries is None else boundaries.long()
    output: Tensor = fla.causal_conv1d(x.contiguous(), filters.contiguous(), activation="silu", cu_seqlens=cu_seqlens)[
        0
    ]
    return output


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, boundaries: Tensor | None
) -> Tensor:
    """Compute `delta_rule.chunked` of (n, L, …) right-padded sequences or of a packed row (1, T, …).  Returns (n, L, H, V).

    Key heads may be fewer than value heads.
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
    """Compute causal attention within each sequence of a packed row, (1, T, heads, C)."""
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
