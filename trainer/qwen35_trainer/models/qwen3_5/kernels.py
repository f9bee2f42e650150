"""Kernels for accelerators that know where the sequences of a packed row begin. Imported when first used.

    gated delta rule   flash-linear-attention (`fla`), any accelerator that it supports
    full attention     torch.nn.attention.varlen (FlashAttention within torch), NVIDIA, 16-bit

Neither is needed: without them a packed row is split (`layout.py`). Nothing in this file has met hardware; what guards
it is the numeric self-check at load (`packing.py`).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


@cache
def _installed(name: str) -> bool:
    return find_spec(name) is not None


def has_delta_rule(x: Tensor) -> bool:
    """Never on a CPU: `fla` imports there when Triton is installed, then fails in every call. It refuses float32."""
    return x.device.type != "cpu" and x.dtype in HALF and _installed("fla")


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, boundaries: Tensor | None
) -> Tensor:
    """`delta_rule.chunked` of (n, L, …) right-padded sequences or of a packed row (1, T, …).  Returns (n, L, H, V)."""
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
    return x.device.type == "cuda" and x.dtype in HALF


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """Causal attention within each sequence of a packed row, (1, T, heads, C)."""
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
