"""One full-attention layer of Hugging Face's Qwen3.5, computed from the module's own parameters.

The same arithmetic as the library's `forward` (per-head normalisation, rotation of a quarter of each head, output
gate), without a mask of all tokens against all tokens: padding stands to the right of every sequence, and a packed row
is split or handed to a kernel that knows its boundaries.

Shapes: n rows, l tokens that this process holds, D hidden, H heads, G key/value heads, C channels per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import HFModule, kernels, sequence_parallel
from qwen35_trainer.models.qwen3_5.layout import Layout


def mix(layer: HFModule, hidden: Tensor, layout: Layout) -> Tensor:
    """hidden: (n, l, D), normalised.  Returns (n, l, D)."""
    query, key, value, gate = project(layer, hidden, layout.cos.unsqueeze(-2), layout.sin.unsqueeze(-2))
    if layout.group is not None:
        key, value = (sequence_parallel.replicate(x, layout.group) for x in (key, value))
        query, key, value = (sequence_parallel.to_heads(x, layout.group) for x in (query, key, value))
    if layout.boundaries is not None and kernels.has_varlen_attention(query):
        mixed = kernels.varlen_attention(query, key, value, layout.boundaries, layout.longest)
    else:
        mixed = layout.apart(_attend, query, key, value)
    if layout.group is not None:
        mixed = sequence_parallel.to_tokens(mixed, layout.group)
    return layer.o_proj(mixed.flatten(2) * gate)


def project(layer: HFModule, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated query (…, H, C) and key (…, G, C), value (…, G, C) and the output gate (…, H·C) of (…, D)."""
    query, gate = layer.q_proj(hidden).unflatten(-1, (-1, 2 * layer.head_dim)).chunk(2, dim=-1)
    query = layer.q_norm(query)
    key = layer.k_norm(layer.k_proj(hidden).unflatten(-1, (-1, layer.head_dim)))
    value = layer.v_proj(hidden).unflatten(-1, (-1, layer.head_dim))
    turn = getattr(layer, "rotate", rotate)  # an accelerator's own, see `npu.py`
    return turn(query, cos, sin), turn(key, cos, sin), value, gate.flatten(-2).sigmoid()


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of right-padded sequences, (b, l, heads, C)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first channels only (Qwen3.5 rotates a quarter of each head)."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)
