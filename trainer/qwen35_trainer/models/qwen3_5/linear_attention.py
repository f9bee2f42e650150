"""One Gated DeltaNet layer of Hugging Face's Qwen3.5, computed from the module's own parameters.

The same arithmetic as the library's `forward`, with two differences that matter here: the state is explicit, so that
sequences of different lengths can share a batch (see `decoder.py`), and a short sequence costs its own length instead
of 64 positions (see `delta_rule.py`).

Shapes: B sequences, T positions, D hidden, C convolution channels, W convolution width, H value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import HFModule, delta_rule


@dataclass(frozen=True)
class LinearState:
    """What a layer remembers: its last inputs to the convolution (B, W - 1, C) and the memory (B, H, K, V) in float32."""

    inputs: Tensor
    memory: Tensor


def sequence(layer: HFModule, hidden: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, LinearState | None]:
    """All positions of right-padded sequences from an empty state.

    hidden: (B, T, D).  lengths: (B,) valid positions; without it no state is returned, because outputs at valid
    positions never depend on what stands to their right.  Returns (B, T, D) and the state after `lengths` positions.
    """
    mixed, gate, log_decay, beta = _project(layer, hidden)
    width = layer.conv1d.weight.shape[-1]
    padded = F.pad(mixed, (0, 0, width - 1, 0))
    query, key, value = _heads(layer, F.silu(_convolve(layer, padded)))
    if lengths is not None:
        valid = (torch.arange(hidden.shape[1], device=hidden.device) < lengths.unsqueeze(1)).unsqueeze(-1)
        log_decay, beta = log_decay * valid, beta * valid
    output, memory = delta_rule.chunked(query, key, value, log_decay, beta)
    output = _close(layer, output.to(hidden.dtype), gate)
    if lengths is None:
        return output, None
    last = lengths.unsqueeze(1) + torch.arange(width - 1, device=hidden.device)
    return output, LinearState(padded.gather(1, last.unsqueeze(-1).expand(-1, -1, padded.shape[-1])), memory)


def step(layer: HFModule, hidden: Tensor, state: LinearState) -> Tensor:
    """One position of each sequence.  hidden: (B, D).  `state` is advanced in place.  Returns (B, D)."""
    mixed, gate, log_decay, beta = _project(layer, hidden)
    window = torch.cat((state.inputs, mixed.unsqueeze(1)), dim=1)
    state.inputs.copy_(window[:, 1:])
    convolved = (window * layer.conv1d.weight.squeeze(1).T).sum(1)
    query, key, value = _heads(layer, F.silu(convolved).float())
    output = delta_rule.step(query, key, value, log_decay, beta.float(), state.memory)
    return _close(layer, output.to(hidden.dtype), gate)


def _project(layer: HFModule, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convolution input (..., C), output gate (..., H·V), log decay and write strength (..., H)."""
    beta = layer.in_proj_b(hidden).sigmoid()
    log_decay = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), log_decay, beta


def _convolve(layer: HFModule, padded: Tensor) -> Tensor:
    """Causal depthwise convolution of (B, W - 1 + T, C) as W shifted products: on a CPU its gradient costs a fraction
    of what the general convolution's does.
    """
    weight = layer.conv1d.weight.squeeze(1)
    length = padded.shape[1] - weight.shape[1] + 1
    output = padded[:, :length] * weight[:, 0]
    for i in range(1, weight.shape[1]):
        output = torch.addcmul(output, padded[:, i : i + length], weight[:, i])
    return output


def _heads(layer: HFModule, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split (..., C) into query, key (..., H, K) and value (..., H, V); key heads are shared by several value heads."""
    query, key, value = mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), dim=-1)
    query, key = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (query, key))
    if (shared := layer.num_v_heads // layer.num_k_heads) > 1:
        query, key = (x.repeat_interleave(shared, dim=-2) for x in (query, key))
    return query, key, value.unflatten(-1, (-1, layer.head_v_dim))


def _close(layer: HFModule, output: Tensor, gate: Tensor) -> Tensor:
    """Gated normalisation per head, then the output projection.  output: (..., H, V) → (..., D)."""
    normed = layer.norm(output.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    return layer.out_proj(normed.view(*gate.shape))
