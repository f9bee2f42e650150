"""Log-probabilities and entropies of tokens, with the vocabulary of the logits divided over tensor-parallel ranks.

    hidden (R, D) ─► logits of this rank's part of the vocabulary (R, V / ranks)
                  ─► maximum, sum of exponentials, logit of the target: all-reduced ─► scores (R,)

Every rank returns the same scores, and computes the gradient of its own logits. Only the logits of one chunk of rows
exist at a time. If there are several chunks, the backward pass computes the logits again.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.models.qwen3_5.head import CHUNK_LOGITS, TokenScores
from qwen35_trainer.models.qwen3_5.kept_logits import REMOVED_LOGIT, KeptLogits


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: ProcessGroup,
    *,
    vocabulary: int,
    with_entropy: bool,
    float32_logits: bool,
    kept: KeptLogits | None,
    chunk: int | None = None,
) -> TokenScores:
    """Compute the scores of `targets` under softmax(hidden · weightᵀ / temperature), as
    `token_scores` of models/qwen3_5/head.py does with the whole output layer. Collective.

    hidden: (R, D), R rows of D channels, the same on every rank of `group`. The caller must sum its
      gradient over the ranks.
    weight: (V', D), the rows of the output layer for the V' tokens of this rank.
    vocabulary: number of tokens of the model. Rows for token ids of this number and above are padding.
    targets: (R,) int64.
    kept: the tokens over which each row's softmax is taken; None: the whole vocabulary.
    chunk: number of rows per chunk; None: as many as `CHUNK_LOGITS` allows.
    """
    first = dist.get_rank(group) * len(weight)
    real = min(len(weight), max(0, vocabulary - first))
    rows = chunk or max(1, CHUNK_LOGITS // len(weight))
    log_probs, entropies = [], []
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        keeps = None if kept is None else _keeps(kept.candidates[part], first, len(weight)).to(hidden.device)
        compute = partial(
            _scores, first=first, real=real, temperature=temperature, group=group, float32_logits=float32_logits
        )
        arguments = hidden[part], weight, targets[part], keeps
        if len(targets) <= rows:
            log_prob, entropy = compute(*arguments)
        else:
            log_prob, entropy = checkpoint(compute, *arguments, use_reentrant=False)
        log_probs.append(log_prob)
        entropies.append(entropy)
    return TokenScores(torch.cat(log_probs), torch.cat(entropies) if with_entropy else None)


def _scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    keeps: Tensor | None,
    *,
    first: int,
    real: int,
    temperature: float,
    group: ProcessGroup,
    float32_logits: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of R rows, (R,) float32 each. Collective.

    keeps: (R, V') bool, which of this rank's V' tokens count in the softmax; None: all.
    first: id of this rank's first token.
    real: number of this rank's tokens without padding.
    """
    if float32_logits:
        hidden, weight = hidden.float(), weight.float()
    logits = (hidden @ weight.T).float() / temperature
    own = torch.arange(len(weight), device=weight.device)
    removed = (own >= real).unsqueeze(0) if keeps is None else ~keeps | (own >= real)
    logits = logits.masked_fill(removed, REMOVED_LOGIT)
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(1)
    exponentials = shifted.exp()
    is_own = (targets >= first) & (targets < first + len(weight))
    places = (targets - first).clamp(0, len(weight) - 1)
    target = shifted.gather(1, places.unsqueeze(1)).squeeze(1) * is_own
    summed = torch.stack((exponentials.sum(-1), target, (exponentials * shifted).sum(-1)))
    total, target, weighted = reduce_from_tensor_model_parallel_region(summed, group=group).unbind()
    return target - total.log(), total.log() - weighted / total


def _keeps(candidates: Candidates, first: int, count: int) -> Tensor:
    """Return which of the `count` tokens from id `first` on are candidates of each of the R rows, (R, count) bool."""
    keeps = np.zeros((len(candidates), count), dtype=np.bool_)
    keeps[candidates.counts == 0] = True
    rows: NDArray[np.int64] = np.repeat(np.arange(len(candidates)), candidates.counts)
    places = candidates.ids.astype(np.int64) - first
    own = (places >= 0) & (places < count)
    keeps[rows[own], places[own]] = True
    return torch.from_numpy(keeps)
