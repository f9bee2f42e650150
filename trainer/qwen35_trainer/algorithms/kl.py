"""Per-token estimators of KL(policy ‖ reference) from the sampled token's log-probability.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, with d = log_probs -
ref_log_probs on tokens x ~ policy:

name  value               as a number (or in the reward)     gradient when it is a loss, d/dθ
K1    d                   unbiased, high variance            ∇logp: 0 in expectation, so it has no effect
K2    d²/2                biased, low variance               d·∇logp: in expectation that of KL(policy ‖ reference)
K3    exp(-d) + d - 1     unbiased, low variance, never < 0  (1 - exp(-d))·∇logp: that of KL(reference ‖ policy)

An estimator with an unbiased value need not have the right gradient. In the reward, use K1 or K3. In the loss, the
expected gradient of K2 is that of KL(policy ‖ reference), and the expected gradient of K3 (customary since GRPO,
arXiv:2402.03300 eq. 4) is that of KL(reference ‖ policy). The two divergences are equal to second order where the
policies are close. These properties hold for tokens drawn from the policy itself; stale tokens are not reweighted here.

K3 has verl's clamps: -d is clamped to ±20 before exp, and the value to at most 10. Beyond a clamp the gradient is 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qwen35_trainer.algorithms.ratio import MAX_LOG_RATIO
from qwen35_trainer.algorithms.registry import Registry

type EstimatorFunction = Callable[[Tensor, Tensor], Tensor]

ESTIMATORS: Registry[EstimatorFunction] = Registry("KL estimator")

MAX_K3_NATS = 10.0


def kl(name: str) -> EstimatorFunction:
    """Return the estimator registered as `name`: (log_probs, ref_log_probs) -> nats.

    All three tensors are (N, T), N sequences of up to T tokens. Raises ValueError if the name is unknown.
    """
    return ESTIMATORS.get(name)


@ESTIMATORS.register("K1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL divergence of each token by d = log_probs - ref_log_probs. An estimate can be negative."""
    return _difference(log_probs, ref_log_probs)


@ESTIMATORS.register("K2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL divergence of each token by d²/2, where d = log_probs - ref_log_probs."""
    return _difference(log_probs, ref_log_probs).square() / 2


@ESTIMATORS.register("K3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL divergence of each token by exp(-d) - 1 + d, where d = log_probs - ref_log_probs.

    The estimate is never negative, and at most 10 nats.
    """
    negated = (-_difference(log_probs, ref_log_probs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(-d) - 1 cancels for nearly equal policies, where the value is about d²/2.
    return (torch.expm1(negated) - negated).clamp(max=MAX_K3_NATS)


def _difference(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    return log_probs.to(wide) - ref_log_probs.to(wide)
