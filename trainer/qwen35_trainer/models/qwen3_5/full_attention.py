"""One full-attention layer of Hugging Face's Qwen3.5, computed from the parameters of the module.

The arithmetic is that of `forward` in transformers (per-head normalisation, rotation of a quarter of each head, output
gate), without a mask of all tokens against all tokens: padding is to the right of every sequence, and a packed row is
split or passed to a kernel that takes its boundaries.

Shapes: n rows, l tokens that this process holds, D hidden, H heads, G key/value heads, C channels per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import HFModule, context_parallel, kernels
from qwen35_trainer.models.qwen3_5.sequence_layout import SequenceLayout


def mix(layer: HFModule, hidden: Tensor, layout: SequenceLayout) -> Tensor:
    """Compute a layer of full attention for every sequence of `layout`.

    hidden: (n, l, D), normalised.  Returns (n, l, D).
    """
    query, key, value, gate = project(layer, hidden, layout.cos.unsqueeze(-2), layout.sin.unsqueeze(-2))
    if layout.context_group is not None:
        key, value = (context_parallel.replicate(x, layout.context_group) for x in (key, value))
        query, key, value = (context_parallel.to_heads(x, layout.context_group) for x in (query, key, value))
    if layout.boundaries is not None and kernels.has_varlen_attention(query):
        mixed = kernels.varlen_attention(query, key, value, layout.boundaries, layout.longest)
    else:
        mixed = layout.apart(_attend, query, key, value)
    if layout.context_group is not None:
        mixed = context_parallel.to_tokens(mixed, layout.context_group)
    return layer.o_proj(mixed.flatten(2) * gate)


def project(layer: HFModule, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project (…, D) to the rotated query (…, H, C) and key (…, G, C), value (…, G, C) and output gate (…, H·C)."""
    query, gate = layer.q_proj(hidden).unflatten(-1, (-1, 2 * layer.head_dim)).chunk(2, dim=-1)
    query = layer.q_norm(query)
    key = layer.k_norm(layer.k_proj(hidden).unflatten(-1, (-1, layer.head_dim)))
    value = layer.v_proj(hidden).unflatten(-1, (-1, layer.head_dim))
    turn = getattr(layer, "rotate", rotate)  # kernels of an accelerator, see `npu.py`
    return turn(query, cos, sin), turn(key, cos, sin), value, gate.flatten(-2).sigmoid()


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention of b right-padded sequences. Arguments and result are (b, l, heads, C)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the first channels of each head, as many as `cos` has; Qwen3.5 rotates a quarter of
    them.
    """
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)
