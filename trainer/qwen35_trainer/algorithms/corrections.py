"""Off-policy corrections: how much a token counts that another policy produced.

The behaviour policy is what sampled the token: older weights, and an inference engine with its own arithmetic. With
r = exp(proximal - behaviour) per token, held to exp(±20), s = Π r and g = (Π r)^(1/tokens) over a sequence:

name          weight of a token                            tokens left out
None          1                                            none
TokenTIS      min(r, cap)                                  none
SequenceTIS   min(s, cap)                                  none
IcePop        r                                            those with r outside [floor, cap]
SequenceMask  1                                            sequences with g outside [floor, cap]
DecoupledPPO  min(r, cap)                                  none

Left-out tokens weigh 0 and stay in the denominators of the aggregation: those are fixed before any log-prob is known,
and equal on every rank. Weights are not normalised to mean 1.

Sources: truncated importance sampling, Ionides 2008, for rollout engines Yao et al. 2025 ("Your efficient RL framework
secretly brings you off-policy RL training"); IcePop, Ling Team, arXiv:2510.18855; sequence masks, Liu et al. 2025
("When speed kills stability"); decoupled PPO, Hilton et al., arXiv:2110.00641, as used by AReaL, arXiv:2505.24298.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .masking import sequence_mean, sequence_sum, zero_padding
from .ratio import LOG_RATIO_BOUND, log_ratio
from .registry import Registry


@dataclass(frozen=True)
class Correction:
    """What the correction decided for each token. Carries no gradient."""

    weights: Tensor
    """(N, T) factor of the token's policy loss; 0 where the token does not train or was left out."""
    keep: Tensor
    """(N, T) bool: trains and was not left out."""


type CorrectionRule = Callable[[Tensor, Tensor, Tensor, float, float], Correction]

CORRECTIONS: Registry[CorrectionRule] = Registry("correction")


def correction(name: str) -> CorrectionRule:
    """The rule called `name`: (behaviour_log_probs (N, T), proximal_log_probs (N, T), mask (N, T), cap, floor).

    `cap` and `floor` bound the ratio itself, not its logarithm. ValueError if the name is unknown.
    """
    return CORRECTIONS.get(name)


@CORRECTIONS.register("None")
def off(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> Correction:
    """Weight 1: the loss's own ratio, taken against the behaviour policy, is all the importance sampling there is."""
    return _corrected(torch.ones_like(_log_ratio(behaviour, proximal, mask)), mask.bool())


@CORRECTIONS.register("DecoupledPPO")
@CORRECTIONS.register("TokenTIS")
def token_tis(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> Correction:
    """Each token's ratio, truncated at `cap`. DecoupledPPO differs only in what its proximal log-probs must be."""
    return _corrected(_log_ratio(behaviour, proximal, mask).exp().clamp(max=cap), mask.bool())


@CORRECTIONS.register("SequenceTIS")
def sequence_tis(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> Correction:
    """The ratio of the whole sequence, truncated at `cap`, the same for each of its tokens."""
    log_ratio = sequence_sum(_log_ratio(behaviour, proximal, mask), mask)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=cap)
    return _corrected(ratio[:, None].expand(mask.shape), mask.bool())


@CORRECTIONS.register("IcePop")
def ice_pop(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> Correction:
    """Each token's ratio, and no token at all where it is outside [floor, cap]."""
    ratio = _log_ratio(behaviour, proximal, mask).exp()
    return _corrected(ratio, mask.bool() & (ratio >= floor) & (ratio <= cap))


@CORRECTIONS.register("SequenceMask")
def sequence_mask(behaviour: Tensor, proximal: Tensor, mask: Tensor, cap: float, floor: float) -> Correction:
    """Weight 1, and no sequence at all whose geometric mean ratio is outside [floor, cap]."""
    log_ratio = _log_ratio(behaviour, proximal, mask)
    mean_ratio = sequence_mean(log_ratio, mask).exp()
    inside = (mean_ratio >= floor) & (mean_ratio <= cap)
    return _corrected(torch.ones_like(log_ratio), mask.bool() & inside[:, None])


def _log_ratio(behaviour: Tensor, proximal: Tensor, mask: Tensor) -> Tensor:
    return log_ratio(proximal.detach(), behaviour.detach(), mask)


def _corrected(weights: Tensor, keep: Tensor) -> Correction:
    return Correction(weights=zero_padding(weights, keep), keep=keep)
