"""Log-probabilities and entropies of tokens, with the vocabulary of the logits divided over tensor-parallel ranks.

    hidden (R, D) ─► logits of this rank's part of the vocabulary (R, V / ranks)
                  ─► maximum, sum of exponentials, logit of the target: all-reduced ─► scores (R,)

Every rank returns the same scores, and computes the gradient of its own logits. Only the logits of one chunk of rows
exist at a time: the backward pass computes them again. It needs no communication, because the logarithm of the sum of
exponentials is kept for each row. The sum of the weight's gradient over chunks is in float32, as in the FSDP engine
(`models/qwen3_5/head.py`), and so are logits with `float32_logits`, whose products need no float32 copy of the weight
(`models/qwen3_5/products.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.models.qwen3_5 import Context, products
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

    The weight's gradient is summed over chunks in float32 and rounded once.
    """
    first = dist.get_rank(group) * len(weight)
    real = min(len(weight), max(0, vocabulary - first))
    rows = chunk or max(1, CHUNK_LOGITS // len(weight))
    part = _Part(first, real, temperature, float32_logits, kept)
    log_probs, entropy = _Scores.apply(hidden, weight, targets, part, group, rows, with_entropy)  # type: ignore[no-untyped-call]
    return TokenScores(log_probs, entropy if with_entropy else None)


@dataclass(frozen=True)
class _Part:
    """A rank's part of the vocabulary, of V' tokens, and how its logits are computed."""

    first: int
    """Id of this rank's first token."""
    real: int
    """Number of this rank's tokens without padding."""
    temperature: float
    float32_logits: bool
    kept: KeptLogits | None

    def logits(self, hidden: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """Return the logits of some rows, divided by the temperature, (rows, V') in float32. Those of removed tokens are
        REMOVED_LOGIT.
        """
        of_rows = hidden[rows]
        product = products.rows_times(of_rows, weight) if self.float32_logits else of_rows @ weight.T
        logits = product.float().div_(self.temperature)
        removed = torch.arange(len(weight), device=weight.device) >= self.real
        if self.kept is not None:
            removed = ~_keeps(self.kept.candidates[rows], self.first, len(weight)).to(weight.device) | removed
        return logits.masked_fill_(removed, REMOVED_LOGIT)

    def places(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the index of each target among this rank's `count` tokens, and whether it is one of them, (rows, 1) each."""
        places = (targets - self.first).unsqueeze(1)
        return places.clamp(0, count - 1), (places >= 0) & (places < count)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        part: _Part,
        group: ProcessGroup,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs, logsumexp, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(3))
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = part.logits(hidden, weight, rows)
            largest = logits.amax(-1, keepdim=True)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            places, are_own = part.places(targets[rows], len(weight))
            shifted = logits.sub_(largest)
            target = (shifted.gather(1, places) * are_own).squeeze(1)
            exponentials = shifted.exp()
            weighted = torch.linalg.vecdot(exponentials, shifted) if with_entropy else torch.zeros_like(target)
            sums = torch.stack((exponentials.sum(-1), target, weighted))
            dist.all_reduce(sums, group=group)
            total, target, weighted = sums.unbind()
            log_probs[rows] = target - total.log()
            entropy[rows] = total.log() - weighted / total
            logsumexp[rows] = largest.squeeze(1) + total.log()
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy)
        ctx.settings = part, chunk, with_entropy
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        part, chunk, with_entropy = ctx.settings
        by_log_prob, by_entropy = (gradient.unsqueeze(1) for gradient in gradients)
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # The gradient of a single chunk is rounded once anyway, and a float32 copy of the weight is large.
        of_weight_type = weight.dtype if len(targets) <= chunk else torch.float32
        of_weight = torch.zeros_like(weight, dtype=of_weight_type) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            # With p = softmax(logits), target t and entropy H: ∂log p_t/∂logits = 1_t - p, ∂H/∂logits = -p (log p + H).
            log_p = part.logits(hidden, weight, rows).sub_(logsumexp[rows].unsqueeze(1))
            p = log_p.exp()
            if with_entropy:
                of_logits = log_p.add_(entropy[rows].unsqueeze(1)).mul_(by_entropy[rows])
                of_logits = of_logits.add_(by_log_prob[rows]).mul_(p).neg_()
            else:
                of_logits = p.mul_(-by_log_prob[rows])
            del log_p, p  # one of them is `of_logits`
            places, are_own = part.places(targets[rows], len(weight))
            of_logits.scatter_add_(1, places, by_log_prob[rows] * are_own)
            of_product = of_logits.div_(part.temperature).to(weight.dtype)
            del of_logits
            if of_hidden is not None:
                of_hidden[rows] = of_product @ weight
            if of_weight is not None and of_weight.dtype == weight.dtype:
                of_weight.addmm_(of_product.T, hidden[rows])
            elif of_weight is not None:
                products.add_outer(of_weight, of_product, hidden[rows])
            del of_product
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None, None, None


def _keeps(candidates: Candidates, first: int, count: int) -> Tensor:
    """Return which of the `count` tokens from id `first` on are candidates of each of the R rows, (R, count) bool."""
    keeps = np.zeros((len(candidates), count), dtype=np.bool_)
    keeps[candidates.counts == 0] = True
    rows: NDArray[np.int64] = np.repeat(np.arange(len(candidates)), candidates.counts)
    places = candidates.ids.astype(np.int64) - first
    own = (places >= 0) & (places < count)
    keeps[rows[own], places[own]] = True
    return torch.from_numpy(keeps)
