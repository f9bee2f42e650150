"""The documented arithmetic of the accelerators' kernels, one sequence after another, on a CPU.

`leaky` ones ignore the boundaries they are given, as kernels of some versions did.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from qwen35_trainer.models.qwen3_5 import kernels


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """flash-linear-attention's, by the reference of the transformers library.

    q, k: (B, T, G, K).  v: (B, T, H, V).  initial_state: (B or sequences, H, K, V) float32.
    """
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if cu_seqlens is None:
        return torch_chunk_gated_delta_rule(
            q, k, v, g, beta, 64, initial_state, output_final_state, use_qk_l2norm_in_kernel
        )
    assert len(q) == 1
    assert cu_seqlens.dtype == torch.int64
    assert int(cu_seqlens[-1]) == q.shape[1]
    parts = list(zip(*(x.split(cu_seqlens.diff().tolist(), 1) for x in (q, k, v, g, beta)), strict=True))
    assert initial_state is None or (len(initial_state) == len(parts) and initial_state.dtype == torch.float32)
    states = [None] * len(parts) if initial_state is None else initial_state.split(1)
    results = [
        chunk_gated_delta_rule(*part, use_qk_l2norm_in_kernel, None, state, output_final_state)
        for part, state in zip(parts, states, strict=True)
    ]
    last = [state for _, state in results if state is not None]
    return torch.cat([output for output, _ in results], 1), torch.cat(last) if last else None


def causal_conv1d(
    x: Tensor, weight: Tensor, activation: str | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, None]:
    """flash-linear-attention's, by torch's convolution in float32.  x: (B, T, C).  weight: (C, W)."""
    assert activation == "silu"
    if cu_seqlens is not None:
        assert cu_seqlens.dtype == torch.int64
        parts = x.split(cu_seqlens.diff().tolist(), 1)
        return torch.cat([causal_conv1d(part, weight, activation)[0] for part in parts], 1), None
    padded = F.pad(x.float().transpose(1, 2), (weight.shape[1] - 1, 0))
    mixed = F.conv1d(padded, weight.float().unsqueeze(1), groups=len(weight))
    return F.silu(mixed).transpose(1, 2).type_as(x), None


def leaky_convolution(*tensors: Tensor, cu_seqlens: Tensor | None = None, **settings: str) -> tuple[Tensor, None]:
    return causal_conv1d(*tensors, **settings)


def leaky_delta_rule(*tensors: Tensor, cu_seqlens: Tensor | None = None, **settings: bool) -> tuple[Tensor, None]:
    return chunk_gated_delta_rule(*tensors, **settings)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch.nn.attention.varlen's, of (T, heads, C). The last query of a sequence sees all of its keys."""
    lengths, key_lengths = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max(lengths)
    assert max_k == max(key_lengths)
    assert window_size == (-1, 0)
    assert enable_gqa or query.shape[1] == key.shape[1]
    parts = zip(
        *(x.transpose(0, 1).split(n, 1) for x, n in ((query, lengths), (key, key_lengths), (value, key_lengths))),
        strict=True,
    )
    mixed = []
    for one_query, one_key, one_value in parts:
        count, keys = one_query.shape[1], one_key.shape[1]
        seen = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
        mixed.append(
            F.scaled_dot_product_attention(one_query, one_key, one_value, attn_mask=seen, enable_gqa=enable_gqa)
        )
    return torch.cat(mixed, 1).transpose(0, 1)


def leaky_attention(*arguments: Tensor | int, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
    query, key, value = (x.transpose(0, 1) for x in arguments[:3] if isinstance(x, Tensor))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=enable_gqa).transpose(0, 1)


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    delta_rule=chunk_gated_delta_rule,
    convolution=causal_conv1d,
    attention=varlen_attn,
) -> None:
    """As if this machine had the kernels and the tensors were on an accelerator."""
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = delta_rule  # type: ignore[attr-defined]
    short = ModuleType("fla.modules.convolution")
    short.causal_conv1d = convolution  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops", "fla.modules"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for each in (module, short):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention)
    monkeypatch.setattr(kernels, "has_delta_rule", lambda x: True)
    monkeypatch.setattr(kernels, "has_varlen_attention", lambda x: True)
