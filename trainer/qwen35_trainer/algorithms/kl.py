"""Per-token estimators of KL(policy ‖ reference) from the sampled token's log-probability.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, with d = log_probs -
ref_log_probs on tokens x ~ policy:

name  value               as a number (or in the reward)     gradient when it is a loss, d/dθ
K1    d                   unbiased, high variance            ∇logp: 0 in expectation, it restrains nothing
K2    d²/2                biased, low variance               d·∇logp: in expectation that of KL(policy ‖ reference)
K3    exp(-d) + d - 1     unbiased, low variance, never < 0  (1 - exp(-d))·∇logp: that of KL(reference ‖ policy)

An unbiased value and a right gradient are different wishes. In the reward take K1 or K3. In the loss K2 restrains by
the KL the name promises; K3 (the habit since GRPO, arXiv:2402.03300 eq. 4) by the one of exchanged arguments, equal to
second order where the policies are close.
The statements hold for tokens drawn from the policy itself; nothing here reweights stale tokens.

Clamps as in verl: in K3, -d is held to ±20 before exp and the value to at most 10. Beyond a clamp the gradient is 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .ratio import LOG_RATIO_BOUND
from .registry import Registry

type Estimator = Callable[[Tensor, Tensor], Tensor]

ESTIMATORS: Registry[Estimator] = Registry("KL estimator")

K3_BOUND = 10.0


def kl(name: str) -> Estimator:
    """The estimator called `name`: (log_probs (N, T), ref_log_probs (N, T)) -> (N, T) nats. ValueError if unknown."""
    return ESTIMATORS.get(name)


@ESTIMATORS.register("K1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The plain log-ratio d, negative on about half of the tokens."""
    return _difference(log_probs, ref_log_probs)


@ESTIMATORS.register("K2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Half the squared log-ratio, d²/2."""
    return _difference(log_probs, ref_log_probs).square() / 2


@ESTIMATORS.register("K3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: the reference's ratio with d as control variate."""
    negated = (-_difference(log_probs, ref_log_probs)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1 keeps the digits that exp(-d) - 1 cancels for nearly equal policies, where the value is about d²/2.
    return (torch.expm1(negated) - negated).clamp(max=K3_BOUND)


def _difference(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    return log_probs.to(wide) - ref_log_probs.to(wide)
