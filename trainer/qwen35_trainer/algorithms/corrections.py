"""Off-policy corrections: they weigh each token in the loss, to make up for staleness and train-inference mismatch.

The behaviour policy sampled the token. It used older model weights (staleness), in an inference engine that rounds
differently (mismatch). The proximal policy is the centre of the trust region. Its log-probs are computed with the model
weights at the batch's start if the caller passes such log-probs, and with the current model weights otherwise. The
table in objective.py lists which log-probs each correction uses as proximal.

With r = exp(log-prob of the proximal policy - log-prob of the behaviour policy) per token, clamped to exp(±20), and
with s = Π r and g = (Π r)^(1/tokens) over a sequence:

name          weight of a token                            tokens left out
None          1                                            none
Recomputed    1                                            none
TokenTIS      min(r, cap)                                  none
SequenceTIS   min(s, cap)                                  none
IcePop        r                                            tokens with r outside [floor, cap]
SequenceMask  1                                            sequences with g outside [floor, cap]
DecoupledPPO  min(r, cap)                                  none

`cap` and `floor` are `spec.algorithm.correction.cap` and `floor`. Tokens that are left out have weight 0 but still count in
the denominators of the aggregation, which are fixed before any log-prob is computed. Weights are not normalised to mean 1.

Sources: truncated importance sampling, Ionides 2008, for rollout engines Yao et al. 2025 ("Your efficient RL framework
secretly brings you off-policy RL training"); IcePop, Ling Team, arXiv:2510.18855; sequence masks, Liu et al. 2025
("When speed kills stability"); decoupled PPO, Hilton et al., arXiv:2110.00641, as used by AReaL, arXiv:2505.24298.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35_trainer.algorithms.masking import sequence_mean, sequence_sum, zero_padding
from qwen35_trainer.algorithms.ratio import MAX_LOG_RATIO, log_ratio
from qwen35_trainer.algorithms.registry import Registry


@dataclass(frozen=True)
class CorrectedWeights:
    """Weights by which a correction multiplies the policy loss of each token of one micro-batch.
    They carry no gradient.

    Shapes: N sequences of up to T tokens.
    """

    weights: Tensor
    """(N, T) factor of each token's policy loss; 0 for tokens that do not train or that the correction leaves out."""
    keep: Tensor
    """(N, T) bool, true for tokens that train and that the correction does not leave out."""


type CorrectionFunction = Callable[[Tensor, Tensor, Tensor, float, float], CorrectedWeights]

CORRECTIONS: Registry[CorrectionFunction] = Registry("correction")


def correction(name: str) -> CorrectionFunction:
    """Return the function registered as `name`.

    The function's arguments are behaviour_log_probs, proximal_log_probs and mask, each (N, T) for N sequences of up to
    T tokens, and `cap` and `floor`, which bound the ratio of probabilities, not its logarithm. Raises ValueError if
    the name is unknown.
    """
    return CORRECTIONS.get(name)


@CORRECTIONS.register("Recomputed")
@CORRECTIONS.register("None")
def off(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh every trained token by 1.

    None and Recomputed both use this function. With None, the ratio in the loss has the behaviour policy in its
    denominator, so that the loss itself corrects for the difference between the behaviour policy and the current
    policy. With Recomputed, the denominator is `proximal`, which must have been computed with the model weights at the
    batch's start, and nothing corrects for the difference between the behaviour policy and the proximal policy.
    """
    return _corrected(torch.ones_like(_log_ratio(behaviour, proximal, mask)), mask.bool())


@CORRECTIONS.register("DecoupledPPO")
@CORRECTIONS.register("TokenTIS")
def token_tis(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh each token by the ratio of its probabilities, proximal / behaviour, truncated to `cap`
    (truncated importance sampling).

    TokenTIS and DecoupledPPO both use this function. For DecoupledPPO, `proximal` must have been computed with the
    model weights at the batch's start.
    """
    return _corrected(_log_ratio(behaviour, proximal, mask).exp().clamp(max=cap), mask.bool())


@CORRECTIONS.register("SequenceTIS")
def sequence_tis(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh each token by the product of the ratios proximal / behaviour of all tokens of its sequence,
    truncated to `cap`.
    """
    log_ratio = sequence_sum(_log_ratio(behaviour, proximal, mask), mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
    return _corrected(ratio[:, None].expand(mask.shape), mask.bool())


@CORRECTIONS.register("IcePop")
def ice_pop(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh each token by the ratio of its probabilities, proximal / behaviour; leave out tokens whose ratio is
    outside [floor, cap].
    """
    ratio = _log_ratio(behaviour, proximal, mask).exp()
    return _corrected(ratio, mask.bool() & (ratio >= floor) & (ratio <= cap))


@CORRECTIONS.register("SequenceMask")
def sequence_mask(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh tokens by 1, and leave out whole sequences whose mean ratio is outside [floor, cap].

    The mean ratio is the geometric mean of the ratios proximal / behaviour of the probabilities of
    the sequence's tokens.
    """
    log_ratio = _log_ratio(behaviour, proximal, mask)
    mean_ratio = sequence_mean(log_ratio, mask).exp()
    inside = (mean_ratio >= floor) & (mean_ratio <= cap)
    return _corrected(torch.ones_like(log_ratio), mask.bool() & inside[:, None])


def _log_ratio(behaviour: Tensor, proximal: Tensor, mask: Tensor) -> Tensor:
    return log_ratio(proximal.detach(), behaviour.detach(), mask)


def _corrected(weights: Tensor, keep: Tensor) -> CorrectedWeights:
    return CorrectedWeights(weights=zero_padding(weights, keep), keep=keep)
