"""The passes of the head over a chunk's product of hidden states and weight, in torch's operations.

`head_kernels.py` has the same passes in Triton.

    product ─► prepare ─► reduce: log-probs, entropies       forward
                   └────► gradient: that of the product      backward

With logits z = product/τ, p = softmax(z) and entropy H: ∂log p_t/∂z = 1_t - p, ∂H/∂z = -p (log p + H).
"""

from __future__ import annotations

import torch
from torch import Tensor


def prepare(product: Tensor, temperature: float) -> Tensor:
    """Convert logits (R, V), not yet divided by the temperature, to log-probabilities in float32.

    May overwrite the logits.
    """
    logits = product if temperature == 1 else product.float().div_(temperature)
    return logits.log_softmax(-1, dtype=torch.float32)


def reduce(
    prepared: Tensor,
    targets: Tensor,
    temperature: float,  # not used: `prepare` has divided by it
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log-probs of the targets, the logsumexp of each row of `prepared`, which `gradient` needs, and the entropies.

    All are (R,) float32. The entropies are None without `with_entropy`.
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
    """Compute the gradient of the loss with respect to the logits, (R, V). May overwrite `prepared`.

    by_log_prob, by_entropy: (R,) gradients of the loss with respect to log-probs and entropies; by_entropy is None if
    entropies were not computed. logsumexp, entropy: as `reduce` returned them.
    """
    probability, upstream = prepared.exp(), by_log_prob.unsqueeze(1)
    if entropy is not None and by_entropy is not None:
        surprise = prepared.add_(entropy.unsqueeze(1)).mul_(by_entropy.unsqueeze(1))
        of_logits = surprise.add_(upstream).mul_(probability).neg_()
    else:
        of_logits = probability.mul_(-upstream)
    of_logits.scatter_add_(1, targets.unsqueeze(1), upstream)
    return of_logits if temperature == 1 else of_logits.div_(temperature)
