"""Draws the next tokens, and computes their log-probabilities under the distribution from which they were drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DrawnTokens(NamedTuple):
    """The tokens that were drawn from n rows of logits, one token for each row."""

    ids: Tensor
    """(n,) int64: id of the token that was drawn for each row."""
    log_probs: Tensor
    """(n,) float32: log-probability of each token under the distribution from which it was drawn."""
    kept: Tensor | None
    """(n, vocabulary) bool, true for the tokens that could have been drawn; None: all tokens, in every row."""


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, generator: torch.Generator
) -> DrawnTokens:
    """Draw a token for each row of logits.

    logits: (n, vocabulary) float32. temperature, top_p, min_p: (n,) float32. top_k: (n,) int64; 0 keeps all tokens.
    generator: on the device of the logits.

    Applies the temperature, then min-p, then top-k, then top-p, and renormalises. This is the order of vLLM;
    transformers applies min-p last. Temperature 0 takes the most likely token, and returns its log-probability at
    temperature 1 over the whole vocabulary.
    """
    greedy = temperature == 0
    scaled, kept = logits / temperature.masked_fill(greedy, 1.0).unsqueeze(1), None
    if bool((top_k > 0).any()) or bool((top_p < 1).any()) or bool((min_p > 0).any()):
        kept = _kept(
            scaled, top_p.masked_fill(greedy, 1.0), top_k.masked_fill(greedy, 0), min_p.masked_fill(greedy, 0.0)
        )
        scaled = scaled.masked_fill(~kept, float("-inf"))
    log_probs = scaled.log_softmax(-1)
    # Gumbel-max: one pass, no cumulative sums, and exact in distribution.
    # Clamped above 0: an exponential draw of exactly 0, which some platforms make, would win against every likelihood.
    noise = torch.empty_like(log_probs).exponential_(generator=generator).clamp_(min=2**-25).log_()
    tokens = torch.where(greedy, logits.argmax(-1), (log_probs - noise).argmax(-1))
    return DrawnTokens(tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1), kept)


def _kept(logits: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens min-p, top-k and top-p keep, (n, vocabulary) bool. The most likely token is always kept.

    Min-p drops a token that is less likely than `min_p` times the most likely one. Top-k drops all but the `top_k` most
    likely tokens. Top-p renormalises the remaining tokens, and drops a token if the tokens that are more likely have a
    total probability of at least `top_p`.
    """
    ordered, index = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    dropped = (top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1))
    dropped |= ordered < ordered[:, :1] + min_p.log().unsqueeze(1)  # the logarithm of 0 is -inf, which drops nothing
    probabilities = ordered.masked_fill(dropped, float("-inf")).softmax(-1)
    more_likely = probabilities.cumsum(-1) - probabilities
    # Rounding: with top-p 1 the sum may reach 1 before the last tokens.
    dropped |= (more_likely >= top_p.unsqueeze(1)) & (top_p.unsqueeze(1) < 1)
    dropped[:, 0] = False
    return ~dropped.gather(-1, index.argsort(-1))
