"""The head's passes over the logits of a chunk of rows (the product hidden states · weightᵀ), in PyTorch operations.

`head_kernels.py` has the same passes in Triton.

    product ─► prepare ─► reduce: log-probs, entropies               forward
                   └────► gradient with respect to the product       backward

With temperature τ, logits z = product/τ, p = softmax(z), target t, its one-hot vector 1_t, and entropy H:
∂log p_t/∂z = 1_t - p, ∂H/∂z = -p (log p + H).
"""

from __future__ import annotations

import torch
from torch import Tensor


def prepare(product: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities in float32 for logits that are not yet divided by the temperature.

    product: the logits, (rows, vocabulary). They may be overwritten.
    """
    logits = product if temperature == 1 else product.float().div_(temperature)
    return logits.log_softmax(-1, dtype=torch.float32)


def reduce(
    prepared: Tensor,
    targets: Tensor,
    temperature: float,  # not used: `prepare` has divided by it
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return three (R,) float32 tensors: log-probs of the targets, the logsumexp of each row, and entropies.

    prepared: (R, V) from `prepare`, R rows over V tokens of the vocabulary. temperature: not used, because `prepare` has
    divided by it. The logsumexp of each row is 0, because `prepare` returns log-probabilities. The entropies are None if
    `with_entropy` is false.
    """
    log_probs = prepared.gather(1, targets.unsqueeze(1)).squeeze(1)
    entropy = -torch.linalg.vecdot(prepared.exp(), prepared) if with_entropy else None
    return log_probs, torch.zeros_like(log_probs), entropy


def gradient(
    prepared: Tensor,
    targets: Tensor,
    logsumexp: Tensor,  # not used: 0 for log-probabilities
    entropy: Tensor | None,
    by_log_prob: Tensor,
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient of the loss with respect to the logits, (R, V), for R rows and V tokens of the vocabulary.

    prepared: result of `prepare`. It may be overwritten.
    logsumexp, entropy: results of `reduce`. The logsumexp is not used.
    by_log_prob, by_entropy: (R,) gradients of the loss with respect to log-probs and entropies. by_entropy is None if
      entropies were not computed.
    """
    probability, upstream = prepared.exp(), by_log_prob.unsqueeze(1)
    if entropy is not None and by_entropy is not None:
        surprise = prepared.add_(entropy.unsqueeze(1)).mul_(by_entropy.unsqueeze(1))
        of_logits = surprise.add_(upstream).mul_(probability).neg_()
    else:
        of_logits = probability.mul_(-upstream)
    of_logits.scatter_add_(1, targets.unsqueeze(1), upstream)
    return of_logits if temperature == 1 else of_logits.div_(temperature)
