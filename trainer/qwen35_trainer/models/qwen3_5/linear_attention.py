"""One Gated DeltaNet layer of Hugging Face's Qwen3.5, computed from the parameters of the module.

The arithmetic is that of `forward` in transformers, with three differences:
- The sequences of a packed row do not affect each other.
- The state is explicit, so that sequences of different lengths can share a batch (`decoder.py`), and responses can begin
  from the state after a prompt that is computed once (`shared_prompts.py`).
- A sequence of fewer than 64 positions is not padded to 64 positions (`delta_rule.py`).

Shapes: B sequences, T positions, D hidden, C convolution channels, W convolution width, H value heads, G key heads,
K dimension of a key, V dimension of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import (
    HFModule,
    context_parallel,
    convolution,
    delta_rule,
    kernels,
    npu_delta_rule,
)
from qwen35_trainer.models.qwen3_5.sequence_layout import SequenceLayout
from qwen35_trainer.models.qwen3_5.shared_prompts import CutRow, PromptLayout


@dataclass(frozen=True)
class LinearState:
    """Decoding state of one layer for B sequences.

    inputs: (B, W - 1, C), the last inputs of the convolution of width W with C channels.
    memory: (B, H, K, V) float32, the memory of the delta rule: H value heads, K channels of a key, V
      channels of a value.
    """

    inputs: Tensor
    memory: Tensor


def mix(layer: HFModule, hidden: Tensor, layout: SequenceLayout) -> Tensor:
    """Compute a Gated DeltaNet layer for every sequence of `layout`, starting from an empty state or from that of its prompt.

    hidden: (n, l, D), normalised: n rows, l tokens of this process, D channels. Returns (n, l, D).
    """
    mixed, gate, log_decay, beta = _project(layer, hidden)
    filters = layer.conv1d.weight.squeeze(1)
    if layout.context_group is not None:
        mixed, filters = _own_channels(layer, mixed, filters, layout.context_group)
        log_decay, beta = (context_parallel.to_heads(x, layout.context_group) for x in (log_decay, beta))
    if layout.prompts is not None:
        output = _segments(layer, filters, layout.prompts, mixed, log_decay, beta)
    elif kernels.has_delta_rule(mixed):
        query, key, value = _heads(layer, kernels.convolution(mixed, filters, layout.int64_boundaries))
        output = kernels.delta_rule(query, key, value, log_decay, beta, layout.int64_boundaries)
    else:
        output = layout.apart(partial(_whole, layer, filters), mixed, log_decay, beta)
    output = output.to(hidden.dtype)
    if layout.context_group is not None:
        output = context_parallel.to_tokens(output, layout.context_group)
    return _close(layer, output, gate)


def _whole(layer: HFModule, filters: Tensor, mixed: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Compute convolution and delta rule of B right-padded sequences of T positions. Returns (B, T,
    value heads, channels).

    Both operations are causal, so padding does not affect the outputs of real tokens.
    """
    query, key, value = _heads(layer, convolution.convolve(mixed, filters))
    return npu_delta_rule.outputs(query, key, value, log_decay, beta)


def _segments(
    layer: HFModule, filters: Tensor, prompts: PromptLayout, mixed: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Compute convolution and delta rule of a packed row in which sequences share prompts. Returns (1, T, value heads, channels).

    The convolution needs no state: each segment is convolved together with the last inputs of its prompt.
    """
    windows = prompts.windows
    [inputs] = windows.cut(mixed)
    if kernels.has_delta_rule(mixed):
        convolved = kernels.convolution(inputs, filters, windows.int64_boundaries)
    else:
        convolved = windows.split.apply(partial(convolution.convolve, filters=filters), (inputs,))
    tensors = (*_heads(layer, convolved.index_select(1, prompts.of_windows)), log_decay, beta)
    beginnings, states = _delta_rule(prompts.beginnings, None, *tensors)
    continuations, _ = _delta_rule(prompts.continuations, states.index_select(0, prompts.prompts), *tensors)
    return torch.cat((beginnings, continuations), dim=1).index_select(1, prompts.back)


def _delta_rule(row: CutRow, states: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the delta rule for the runs of `row`, each from its state. Returns outputs (1, T', H, V) and the last states.

    tensors: query, key, value, log decay and beta of the whole packed row, (1, T, …). states: (runs, H, K, V) float32.
    """
    query, key, value, log_decay, beta = own = row.cut(*tensors)
    if kernels.has_delta_rule(query):
        return kernels.delta_rule_from(states, query, key, value, log_decay, beta, row.int64_boundaries)
    return row.split.scan(_from_state, own, states)


def _from_state(
    state: Tensor | None, real: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule of right-padded sequences from `state`. real: (b, l), false for padding."""
    mask = real.unsqueeze(-1)
    return delta_rule.chunked(query, key, value, log_decay * mask, beta * mask, state)


def _own_channels(
    layer: HFModule, mixed: Tensor, filters: Tensor, context_group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Exchange tokens for channels, so that this process has all tokens of its part of the query, key and value heads.

    mixed: (rows, own tokens, C) → (rows, all tokens, C / S). filters: (C, width) → (C / S, width), because a depthwise
    convolution needs only its own channels. C: channels, S: size of the group. In the results, the channels of queries
    come first, then those of keys, then those of values.
    """
    ranks, sizes = context_group.size(), (layer.key_dim, layer.key_dim, layer.value_dim)
    by_rank = torch.cat([part.unflatten(-1, (ranks, -1)) for part in mixed.split(sizes, dim=-1)], dim=-1)
    own = torch.cat([part.chunk(ranks)[context_group.rank()] for part in filters.split(sizes)])
    return context_parallel.to_heads(by_rank, context_group).squeeze(2), own


def sequence(layer: HFModule, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, LinearState]:
    """Compute a Gated DeltaNet layer for all positions of right-padded sequences, starting from an empty state.

    hidden: (B, T, D), B sequences of T positions with D channels. lengths: (B,) number of real tokens of each sequence.
    Returns the outputs (B, T, D), and the state after the last real token of each sequence.
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
    """Compute a Gated DeltaNet layer for one position of each of B sequences, and advance `state` in place.

    hidden: (B, D), D channels. Returns (B, D).
    """
    mixed, gate, log_decay, beta = _project(layer, hidden)
    window = torch.cat((state.inputs, mixed.unsqueeze(1)), dim=1)
    state.inputs.copy_(window[:, 1:])
    query, key, value = _heads(layer, convolution.step(window, layer.conv1d.weight.squeeze(1)).float())
    output = delta_rule.step(query, key, value, log_decay, beta, state.memory)
    return _close(layer, output.to(hidden.dtype), gate)


def _project(layer: HFModule, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project hidden states (..., D) to four tensors: convolution input, output gate, log decay and write strength.

    Shapes: (..., C), (..., H·V), (..., H) float32 and (..., H) float32.
    """
    beta = layer.in_proj_b(hidden).float().sigmoid()
    log_decay = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), log_decay, beta


def _heads(layer: HFModule, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split (..., C) into query and key (..., G, K), and value (..., H, V). H / G value heads share one
    of the G key heads.

    With context parallelism over S processes, C, G and H are those of one process: the totals divided by S.
    """
    key_dim = layer.key_dim * mixed.shape[-1] // (2 * layer.key_dim + layer.value_dim)
    query, key, value = mixed.split((key_dim, key_dim, mixed.shape[-1] - 2 * key_dim), dim=-1)
    query, key = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (query, key))
    return query, key, value.unflatten(-1, (-1, layer.head_v_dim))


def _close(layer: HFModule, output: Tensor, gate: Tensor) -> Tensor:
    """Apply the gated norm to each head of `output` (..., heads, channels), then the output projection."""
    normed = layer.norm(output.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    return layer.out_proj(normed.view(*gate.shape))
