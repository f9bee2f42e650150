"""One full-attention layer of Hugging Face's Qwen3.5 or Qwen3, computed from the parameters of the module.

The arithmetic is that of `forward` in transformers (per-head normalisation, rotation of a quarter of each head, output
gate where the model has one), without a mask of all tokens against all tokens. Padding is to the right of every sequence, where causal
attention does not see it. A packed row is split, or passed to a kernel that takes the boundaries of its sequences.

Shapes: n rows, l tokens that this process holds, D hidden, H heads, G key/value heads, C channels per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import HFModule, context_parallel, kernels
from qwen35_trainer.models.qwen3_5.sequence_layout import SequenceLayout
from qwen35_trainer.models.qwen3_5.shared_prompts import PromptLayout


def mix(layer: HFModule, hidden: Tensor, layout: SequenceLayout) -> Tensor:
    """Compute a layer of full attention for every sequence of `layout`.

    hidden: (n, l, D), normalised: n rows, l tokens of this process, D channels. Returns (n, l, D).
    """
    query, key, value, gate = project(layer, hidden, layout.cos.unsqueeze(-2), layout.sin.unsqueeze(-2))
    if layout.context_group is not None:
        key, value = (context_parallel.replicate(x, layout.context_group) for x in (key, value))
        query, key, value = (context_parallel.to_heads(x, layout.context_group) for x in (query, key, value))
    if layout.prompts is not None:
        mixed = _attend_to_prompts(layout, layout.prompts, query, key, value)
    elif layout.boundaries is not None and kernels.has_varlen_attention(query):
        mixed = kernels.varlen_attention(query, key, value, layout.boundaries, layout.longest)
    else:
        mixed = layout.apart(_attend, query, key, value)
    if layout.context_group is not None:
        mixed = context_parallel.to_tokens(mixed, layout.context_group)
    return output(layer, mixed.flatten(2), gate)


def project(layer: HFModule, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Project hidden states (…, D) with D channels to rotated queries and keys, values, and the output gate.

    Returns query (…, H, C), key (…, G, C), value (…, G, C) and gate (…, H·C), for H query heads and G key/value heads
    of C channels. The gate is None in a model that has none (Qwen3). cos, sin: cosines and sines of the rotary
    embedding, with an axis of size 1 for the heads.
    """
    query, *gates = (
        layer.q_proj(hidden).unflatten(-1, (layer.config.num_attention_heads, -1)).split(layer.head_dim, dim=-1)
    )
    gate = gates[0].flatten(-2).sigmoid() if gates else None
    query = layer.q_norm(query)
    key = layer.k_norm(layer.k_proj(hidden).unflatten(-1, (-1, layer.head_dim)))
    value = layer.v_proj(hidden).unflatten(-1, (-1, layer.head_dim))
    turn = getattr(layer, "rotate", rotate)  # kernels of an accelerator, see `npu.py`
    return turn(query, cos, sin), turn(key, cos, sin), value, gate


def output(layer: HFModule, mixed: Tensor, gate: Tensor | None) -> Tensor:
    """Return the output (…, D) of a layer. mixed: (…, H·C), what its heads have computed. gate: from `project`."""
    projected: Tensor = layer.o_proj(mixed if gate is None else mixed * gate)
    return projected


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention of b right-padded sequences of l tokens. Arguments and result are (b,
    l, heads, channels).
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def _attend_to_prompts(
    layout: SequenceLayout, prompts: PromptLayout, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Compute causal attention of a packed row in which sequences share prompts.

    Arguments and result are (1, T, heads, channels). Queries are computed once for each token of the row. A segment that
    continues a prompt gets copies of the prompt's keys and values, which have few heads.
    """
    if kernels.has_varlen_attention(query):
        assert layout.boundaries is not None
        histories = prompts.histories
        keys, values = histories.cut(key, value)
        return kernels.varlen_attention(
            query, keys, values, layout.boundaries, layout.longest, histories.boundaries, histories.longest
        )
    beginnings = prompts.beginnings
    mixed = [beginnings.split.apply(_attend, beginnings.cut(query, key, value))[0]]
    for prompt, places in prompts.attended:
        of_prompt = (x.index_select(1, prompt) for x in (key, value))
        own = (x[0].index_select(0, places.flatten()).unflatten(0, places.shape) for x in (query, key, value))
        mixed.append(_attend_after(*of_prompt, *own).flatten(0, 1))
    return torch.cat(mixed).index_select(0, prompts.back_from_attended).unsqueeze(0)


def _attend_after(prompt_key: Tensor, prompt_value: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention of b right-padded continuations of l tokens to a prompt of P tokens, and causally to themselves.

    prompt_key, prompt_value: (1, P, heads, channels). All others, and the result, are (b, l, heads, channels).
    """
    count, length = query.shape[:2]
    key, value = (
        torch.cat((before.expand(count, -1, -1, -1), own), dim=1)
        for before, own in ((prompt_key, key), (prompt_value, value))
    )
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    visible = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril(prompt_key.shape[1])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the first channels of each head, and leave the other channels unchanged.

    x: (…, C), C channels of a head. cos, sin: (…, R), where R ≤ C is the number of channels to rotate; in
    Qwen3.5, R = C / 4, and in Qwen3, R = C.
    """
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)
