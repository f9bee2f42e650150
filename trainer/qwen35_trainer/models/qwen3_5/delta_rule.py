"""The gated delta rule: a linear-attention memory that decays by a gate and writes only the difference to its content.

    S_t = exp(g_t) · S_{t-1} + β_t · k_t ⊗ (v_t - (exp(g_t) · S_{t-1})ᵀ k_t)          o_t = S_tᵀ q_t

(Gated DeltaNet, arXiv:2412.06464, eq. 10.) Here q_t and k_t are the inputs scaled to unit length, and q_t is also divided
by √K. `step` computes one position t; `chunked` computes all positions of a sequence in matrix products
(arXiv:2406.06484, section 3.2, with decay). Both run in float32, and agree with each other and with the Hugging Face
reference. The reference pads every sequence to 64 positions; here a chunk is never longer than the sequence, so that
short sequences are cheap on a CPU.

Shapes: B sequences, T positions, H value heads, G key heads (H / G value heads share a key head), K channels of a key,
V channels of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import triangular

CHUNK_POSITIONS = 64
"""Maximum number of positions of a chunk.

In longer chunks, the quadratic cost within a chunk would exceed the cost of the scan over chunks."""


def normalise(x: Tensor) -> Tensor:
    """Scale vectors to unit length over the last dimension, with the formula of flash-linear-attention's kernels."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def step(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Compute the gated delta rule for one position of each of B sequences, and advance `state` in place.

    query, key: (B, G, K), G key heads of K channels. value: (B, H, V), H value heads of V channels; H / G value heads
    share a key head. query and key are scaled to unit length here. log_decay, beta: (B, H). state: (B, H, K, V). All are
    float32. Returns the output (B, H, V).
    """
    query, key = (_per_value_head(x, value) for x in (normalise(query) * query.shape[-1] ** -0.5, normalise(key)))
    state.mul_(log_decay.exp()[..., None, None])
    recalled = (key.unsqueeze(-2) @ state).squeeze(-2)
    state.addcmul_(key.unsqueeze(-1), ((value - recalled) * beta.unsqueeze(-1)).unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).squeeze(-2)


def chunked(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule for B whole sequences of T positions, in chunks of positions.

    query, key: (B, T, G, K), G key heads of K channels. value: (B, T, H, V), H value heads of V channels; H / G value
    heads share a key head. query and key are scaled to unit length here. log_decay (≤ 0), beta: (B, T, H). state:
    (B, H, K, V) before the first position; None: zeros. A position with beta 0 and log_decay 0 does not change the
    state: set both to 0 on padding. Returns the outputs (B, T, H, V) and the state after the last position (B, H, K, V),
    float32.
    """
    length, chunk = query.shape[1], min(CHUNK_POSITIONS, query.shape[1])
    query, key = (_per_value_head(x, value) for x in (query, key))
    query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
    log_decay, beta = (x.transpose(1, 2).float() for x in (log_decay, beta))
    query, key = normalise(query) * query.shape[-1] ** -0.5, normalise(key)

    if missing := -length % chunk:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
        log_decay, beta = (F.pad(x, (0, missing)) for x in (log_decay, beta))
    query, key, value, log_decay, beta = (x.unflatten(2, (-1, chunk)) for x in (query, key, value, log_decay, beta))

    decay = log_decay.cumsum(-1)  # log of the decay from the chunk's start up to and including each position
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()

    # Each position's write corrects for all earlier writes of its chunk: a unit lower-triangular system.
    key_beta = key * beta.unsqueeze(-1)
    system = (key_beta @ key.transpose(-1, -2)) * between
    right = torch.cat((value * beta.unsqueeze(-1), key_beta * decay.exp().unsqueeze(-1)), dim=-1)
    solved = triangular.solve(system, right)
    written, reads = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    attention = (query @ key.transpose(-1, -2)) * between

    query = query * decay.exp().unsqueeze(-1)
    key = key * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    chunk_decay = decay[..., -1].exp()[..., None, None]
    if state is None:
        state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for i in range(query.shape[2]):
        new = written[:, :, i] - reads[:, :, i] @ state
        outputs.append(query[:, :, i] @ state + attention[:, :, i] @ new)
        state = state * chunk_decay[:, :, i] + key[:, :, i].transpose(-1, -2) @ new
    output = torch.cat(outputs, dim=2)[:, :, :length]
    return output.transpose(1, 2), state


def _per_value_head(x: Tensor, value: Tensor) -> Tensor:
    """Repeat the G heads of queries or keys (…, G, channels) to match the H heads of `value` (…, H, channels)."""
    repeats = value.shape[-2] // x.shape[-2]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=-2)
