"""Off-policy corrections: weights of tokens that another policy sampled.

The behaviour policy is the one that sampled the token: older weights, in an inference engine that rounds differently.
The proximal policy is the centre of the trust region: the current weights themselves, or those at the batch's start if the
caller has computed their log-probs. The table in objective.py lists which log-probs each correction uses as proximal.
With r = exp(log-prob of the proximal policy - log-prob of the behaviour policy) per token, clamped to exp(±20), and with
s = Π r and g = (Π r)^(1/tokens) over a sequence:

name          weight of a token                            tokens left out
None          1                                            none
TokenTIS      min(r, cap)                                  none
SequenceTIS   min(s, cap)                                  none
IcePop        r                                            those with r outside [floor, cap]
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
    """The weights by which a correction multiplies the loss of each token of one micro-batch, without gradient."""

    weights: Tensor
    """(N, T) factor of the token's policy loss; 0 where the token does not train or was left out."""
    keep: Tensor
    """(N, T) bool, true for tokens that train and were not left out."""


type CorrectionFunction = Callable[[Tensor, Tensor, Tensor, float, float], CorrectedWeights]

CORRECTIONS: Registry[CorrectionFunction] = Registry("correction")


def correction(name: str) -> CorrectionFunction:
    """Return the function registered as `name`.

    Its arguments are behaviour_log_probs (N, T), proximal_log_probs (N, T), mask (N, T), cap and floor. `cap` and
    `floor` bound the ratio, not its logarithm. Raises ValueError if the name is unknown.
    """
    return CORRECTIONS.get(name)


@CORRECTIONS.register("None")
def off(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh every token by 1.

    With this correction, the ratio of the loss has the behaviour policy in its denominator, so it already accounts for the
    difference between the policies.
    """
    return _corrected(torch.ones_like(_log_ratio(behaviour, proximal, mask)), mask.bool())


@CORRECTIONS.register("DecoupledPPO")
@CORRECTIONS.register("TokenTIS")
def token_tis(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh each token by its probability ratio proximal / behaviour, at most `cap` (truncated importance sampling).

    The correction DecoupledPPO uses the same weights; it differs only in requiring proximal log-probs as an argument.
    """
    return _corrected(_log_ratio(behaviour, proximal, mask).exp().clamp(max=cap), mask.bool())


@CORRECTIONS.register("SequenceTIS")
def sequence_tis(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh each token by the product of the ratios proximal / behaviour of all tokens in its sequence, at most `cap`."""
    log_ratio = sequence_sum(_log_ratio(behaviour, proximal, mask), mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
    return _corrected(ratio[:, None].expand(mask.shape), mask.bool())


@CORRECTIONS.register("IcePop")
def ice_pop(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh each token by its ratio proximal / behaviour, and leave out tokens whose ratio is outside [floor, cap]."""
    ratio = _log_ratio(behaviour, proximal, mask).exp()
    return _corrected(ratio, mask.bool() & (ratio >= floor) & (ratio <= cap))


@CORRECTIONS.register("SequenceMask")
def sequence_mask(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> CorrectedWeights:
    """Weigh tokens by 1, and leave out sequences in which the geometric mean of the ratios is outside [floor, cap].

    A ratio is that of a token's probabilities, proximal / behaviour.
    """
    log_ratio = _log_ratio(behaviour, proximal, mask)
    mean_ratio = sequence_mean(log_ratio, mask).exp()
    inside = (mean_ratio >= floor) & (mean_ratio <= cap)
    return _corrected(torch.ones_like(log_ratio), mask.bool() & inside[:, None])


def _log_ratio(behaviour: Tensor, proximal: Tensor, mask: Tensor) -> Tensor:
    return log_ratio(proximal.detach(), behaviour.detach(), mask)


def _corrected(weights: Tensor, keep: Tensor) -> CorrectedWeights:
    return CorrectedWeights(weights=zero_padding(weights, keep), keep=keep)
