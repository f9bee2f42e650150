"""The candidates of sampled tokens, from the log-probabilities that vLLM returns.

    vLLM's sampler   temperature ─► min-p ─► top-k ─► top-p ─► log-softmax ─► one token is drawn
                                                                   │
    returned         the drawn token, then the n most likely ──────┘   -inf: dropped by the sampler

Top-k sampling keeps the k most likely tokens, and all other tokens whose logit equals the logit of the k-th token: logits in
bfloat16 are often equal. vLLM therefore returns k + `TIED_TOKENS` tokens. The manifest requires top-k for truncated sampling,
because without it any number of tokens could be kept (`manifest.contents.vllm_candidates`).

vLLM can also return the kept tokens themselves (`return_sampling_mask`, vllm-project/vllm#49577, from version 0.28). The option
is not used here. It also needs top-k. It needs Triton (Model Runner V2), which vLLM for CPUs lacks. It refuses greedy sequences,
which evaluations generate by default.
"""

from __future__ import annotations

import math
from array import array

import numpy as np

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.manifest.rollout import MAX_VLLM_TOP_K
from qwen35_trainer.rollout.rollout_engine import Sampling
from qwen35_trainer.rollout.vllm_requests import NewTokens

TIED_TOKENS = 16
"""Number of tokens that vLLM returns beyond the k most likely ones, because several may be as likely as the k-th."""
MAX_RETURNED_TOKENS = MAX_VLLM_TOP_K + TIED_TOKENS
"""Value of vLLM's option `max_logprobs`: the maximum number of tokens that it returns at a position."""


def returned_tokens(sampling: Sampling, vocabulary: int) -> int:
    """Return how many of the most likely tokens vLLM returns at each position, in addition to the drawn token.

    vocabulary: number of tokens of the model. The result is 0 if tokens are drawn from the whole vocabulary. Raises
    ValueError if truncated sampling could keep more than `MAX_VLLM_TOP_K` tokens, because top-k is higher or not set.
    """
    if not sampling.truncates:
        return 0
    most = min(sampling.top_k or vocabulary, vocabulary)
    if most > MAX_VLLM_TOP_K:
        raise ValueError(
            f"top-k {sampling.top_k}: with vLLM, truncated sampling needs rollout.topK from 1 to {MAX_VLLM_TOP_K}, because it returns "
            "that many log-probabilities for each token"
        )
    return min(most + TIED_TOKENS, vocabulary)


class CandidateRecord:
    """The candidates of a sequence's tokens, in the order of generation."""

    def __init__(self) -> None:
        self._counts, self._ids = array("i"), array("i")

    def add(self, new: NewTokens) -> list[float]:
        """Add the candidates of new tokens. Returns the log-probability of each token among its candidates.

        The probabilities of the candidates are divided by their sum, as the trainer does. The sum is 1, unless more
        than `TIED_TOKENS` further tokens have the same logit as the k-th token: vLLM does not return all of these. The
        engine waits for this function once for each sequence of a step, so it avoids numpy, whose calls take longer than
        the arithmetic on so few numbers.
        """
        log_probs = []
        for returned, values in zip(new.returned_ids.tolist(), new.log_probs.tolist(), strict=True):
            kept = {token: value for token, value in zip(returned, values, strict=True) if value != -math.inf}
            self._counts.append(len(kept))
            self._ids.extend(sorted(kept))
            total = math.fsum(map(math.exp, kept.values()))
            log_probs.append(values[0] - math.log(total) if total else math.nan)
        return log_probs

    def since(self, start: int) -> Candidates:
        """Return the candidates of all tokens from index `start` on."""
        first = sum(self._counts[:start])
        return Candidates(np.array(self._counts[start:], np.int32), np.array(self._ids[first:], np.int32))
