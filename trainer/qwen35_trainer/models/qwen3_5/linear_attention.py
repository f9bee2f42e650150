"""One Gated DeltaNet layer of Hugging Face's Qwen3.5, computed from the module's own parameters.

The same arithmetic as the library's `forward`, with three differences that matter here: sequences of a packed row stay
apart, the state is explicit, so that sequences of different lengths can share a batch (see `decoder.py`), and a short
sequence costs its own length instead of 64 positions (see `delta_rule.py`).

Shapes: B sequences, T positions, D hidden, C convolution channels, W convolution width, H value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import HFModule, convolution, delta_rule, kernels, sequence_parallel
from qwen35_trainer.models.qwen3_5.layout import Layout


@dataclass(frozen=True)
class LinearState:
    """What a layer remembers: last inputs to the convolution (B, W - 1, C) and memory (B, H, K, V) in float32."""

    inputs: Tensor
    memory: Tensor


def mix(layer: HFModule, hidden: Tensor, layout: Layout) -> Tensor:
    """Every sequence of `layout` from an empty state.  hidden: (n, l, D), normalised.  Returns (n, l, D)."""
    mixed, gate, log_decay, beta = _project(layer, hidden)
    filters = layer.conv1d.weight.squeeze(1)
    if layout.group is not None:
        mixed, filters = _own_channels(layer, mixed, filters, layout.group)
        log_decay, beta = (sequence_parallel.to_heads(x, layout.group) for x in (log_decay, beta))
    if kernels.has_delta_rule(mixed):
        query, key, value = _heads(layer, kernels.convolution(mixed, filters, layout.boundaries))
        output = kernels.delta_rule(query, key, value, log_decay, beta, layout.boundaries)
    else:
        output = layout.apart(partial(_whole, layer, filters), mixed, log_decay, beta)
    output = output.to(hidden.dtype)
    if layout.group is not None:
        output = sequence_parallel.to_tokens(output, layout.group)
    return _close(layer, output, gate)


def _whole(layer: HFModule, filters: Tensor, mixed: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Convolution and delta rule of right-padded sequences: outputs at real tokens never depend on what stands to
    their right.  Returns (B, T, H, V).
    """
    query, key, value = _heads(layer, convolution.convolve(mixed, filters))
    return delta_rule.chunked(query, key, value, log_decay, beta)[0]


def _own_channels(layer: HFModule, mixed: Tensor, filters: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Of query, key and value heads, which lie one after another in the channels, this process's share for all tokens.

    mixed: (n, l, C) → (n, L, C / S).  filters: (C, W) → (C / S, W): a depthwise convolution needs no other channels.
    """
    ranks, sizes = group.size(), (layer.key_dim, layer.key_dim, layer.value_dim)
    by_rank = torch.cat([part.unflatten(-1, (ranks, -1)) for part in mixed.split(sizes, dim=-1)], dim=-1)
    own = torch.cat([part.chunk(ranks)[group.rank()] for part in filters.split(sizes)])
    return sequence_parallel.to_heads(by_rank, group).squeeze(2), own


def sequence(layer: HFModule, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, LinearState]:
    """All positions of right-padded sequences from an empty state, and what the layer then remembers.

    hidden: (B, T, D).  lengths: (B,) valid positions.  Returns (B, T, D) and the state after `lengths` positions.
    """
    mixed, gate, log_decay, beta = _project(layer, hidden)
    filters = layer.conv1d.weight.squeeze(1)
    width = filters.shape[1]
    padded = F.pad(mixed, (0, 0, width - 1, 0))
    query, key, value = _heads(layer, convolution.convolve(mixed, filters))
    valid = (torch.arange(hidden.shape[1], device=hidden.device) < lengths.unsqueeze(1)).unsqueeze(-1)
    output, memory = delta_rule.chunked(query, key, value, log_decay * valid, beta * valid)
    output = _close(layer, output.to(hidden.dtype), gate)
    last = lengths.unsqueeze(1) + torch.arange(width - 1, device=hidden.device)
    return output, LinearState(padded.gather(1, last.unsqueeze(-1).expand(-1, -1, padded.shape[-1])), memory)


def step(layer: HFModule, hidden: Tensor, state: LinearState) -> Tensor:
    """One position of each sequence.  hidden: (B, D).  `state` is advanced in place.  Returns (B, D)."""
    mixed, gate, log_decay, beta = _project(layer, hidden)
    window = torch.cat((state.inputs, mixed.unsqueeze(1)), dim=1)
    state.inputs.copy_(window[:, 1:])
    query, key, value = _heads(layer, convolution.step(window, layer.conv1d.weight.squeeze(1)).float())
    output = delta_rule.step(query, key, value, log_decay, beta, state.memory)
    return _close(layer, output.to(hidden.dtype), gate)


def _project(layer: HFModule, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convolution input (..., C), output gate (..., H·V), log decay and write strength (..., H), both in float32."""
    beta = layer.in_proj_b(hidden).float().sigmoid()
    log_decay = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), log_decay, beta


def _heads(layer: HFModule, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split (..., C) into query, key (..., G, K) and value (..., H, V); each of the G key heads is shared by H / G value heads.

    Of a layer shared by S processes C, G and H are a process's share, in the same proportions.
    """
    key_dim = layer.key_dim * mixed.shape[-1] // (2 * layer.key_dim + layer.value_dim)
    query, key, value = mixed.split((key_dim, key_dim, mixed.shape[-1] - 2 * key_dim), dim=-1)
    query, key = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (query, key))
    return query, key, value.unflatten(-1, (-1, layer.head_v_dim))


def _close(layer: HFModule, output: Tensor, gate: Tensor) -> Tensor:
    """Gated normalisation per head, then the output projection.  output: (..., H, V) → (..., D)."""
    normed = layer.norm(output.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    return layer.out_proj(normed.view(*gate.shape))
