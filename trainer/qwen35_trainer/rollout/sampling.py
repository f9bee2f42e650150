"""Draws the next tokens, and computes their log-probabilities under the distribution that they were drawn from."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of logits. Returns tokens (n,) int64 and log-probabilities (n,) float32.

    logits: (n, V) float32.  temperature, top_p: (n,) float32.  top_k: (n,) int64, 0 keeps all.

    Applies the temperature, then top-k, then top-p, and renormalises, in the order of vLLM and transformers. Temperature 0 takes the
    most likely token, with its log-probability at temperature 1.
    """
    greedy = temperature == 0
    scaled = logits / temperature.masked_fill(greedy, 1.0).unsqueeze(1)
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        scaled = _truncate(scaled, top_p.masked_fill(greedy, 1.0), top_k.masked_fill(greedy, 0))
    log_probs = scaled.log_softmax(-1)
    # Gumbel-max: one pass, no cumulative sums, and exact in distribution.
    # Clamped above 0: an exponential draw of exactly 0, which some platforms make, would win against every likelihood.
    noise = torch.empty_like(log_probs).exponential_(generator=generator).clamp_(min=2**-25).log_()
    tokens = torch.where(greedy, logits.argmax(-1), (log_probs - noise).argmax(-1))
    return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _truncate(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set the logits of all tokens that top-k or top-p excludes to -inf.

    Top-p excludes a token if the more likely tokens together already have the probability top-p.
    """
    ordered, index = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    dropped = (top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1))
    probabilities = ordered.masked_fill(dropped, float("-inf")).softmax(-1)
    # A token stays if the more likely tokens have not reached top-p together, so the most likely one always stays.
    dropped |= probabilities.cumsum(-1) - probabilities >= top_p.unsqueeze(1)
    dropped[:, 0] = False
    return logits.masked_fill(dropped.gather(-1, index.argsort(-1)), float("-inf"))
