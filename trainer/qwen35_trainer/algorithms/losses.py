"""Policy losses per token, before weights and aggregation.

With r = exp(log_probs - proximal_log_probs), A the advantage and sg the stop-gradient:

name     loss of a token                                          source
PPOClip  max(-A·r, -A·clip(r)); for A < 0 at most -A·dual_clip    arXiv:1707.06347 eq. 7; dual clip: arXiv:1912.09729
GSPO     max(-A·s, -A·clip(s)), s the sequence's ratio            arXiv:2507.18071, in its form GSPO-token
CISPO    -sg(clip(r))·A·log_probs                                 arXiv:2506.13585 (MiniMax-M1)
GPG      -A·log_probs                                             arXiv:2504.02546

clip(r) = clamp(r, 1 - clip_low, 1 + clip_high). Where the proximal policy is the current one, r = 1 and each of these
losses has the gradient -A·∇logp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35_trainer.algorithms.masking import sequence_mean, token_sum, zero_padding
from qwen35_trainer.algorithms.ratio import MAX_LOG_RATIO, log_ratio
from qwen35_trainer.algorithms.registry import Registry


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the policy loss of one micro-batch. Sequences are whole, because GSPO has one ratio per sequence."""

    log_probs: Tensor
    """(N, T) log-probability of each sampled token under the policy that trains; the only field with gradient."""
    proximal_log_probs: Tensor
    """(N, T) log-probability of each sampled token under the policy in the denominator of the ratio r.

    This is the behaviour policy with the correction None, and the proximal policy with every other correction (objective.py).
    """
    advantages: Tensor
    """(N, T) advantage of each token."""
    mask: Tensor
    """(N, T) 1 on tokens that train."""
    clip_low: float
    """A ratio below 1 - clip_low is clipped to 1 - clip_low."""
    clip_high: float
    """A ratio above 1 + clip_high is clipped to 1 + clip_high."""
    dual_clip: float | None
    """Ratio above which PPOClip gives no gradient to a token with a negative advantage; None: no such bound."""


@dataclass(frozen=True)
class LossOutput:
    """Losses and metrics of one micro-batch."""

    per_token: Tensor
    """(N, T) loss of each token, 0 on padding."""
    metrics: dict[str, Tensor]
    """Scalar sums over the trained tokens, which the caller adds over micro-batches and ranks, and divides by the number of
    tokens. ratio: sum of the tokens' ratios. clip_fraction_low, _high and _dual: number of tokens whose loss the bound
    changed."""


type LossFunction = Callable[[LossInputs], LossOutput]

LOSSES: Registry[LossFunction] = Registry("loss")


def policy_loss(name: str) -> LossFunction:
    """Return the loss registered as `name`: LossInputs -> LossOutput. Raises ValueError if unknown."""
    return LOSSES.get(name)


@LOSSES.register("PPOClip")
def ppo_clip(inputs: LossInputs) -> LossOutput:
    """Compute PPO's clipped surrogate loss.

    The dual clip limits the loss of a token with a negative advantage and a large ratio.
    """
    advantages = zero_padding(inputs.advantages, inputs.mask)
    ratio = log_ratio(inputs.log_probs, inputs.proximal_log_probs, inputs.mask).exp()
    loss, metrics = _clipped_surrogate(ratio, advantages, inputs)
    dual = torch.zeros_like(loss, dtype=torch.bool)
    if inputs.dual_clip is not None:
        bound = -advantages * inputs.dual_clip
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return _output(loss, inputs, **metrics, clip_fraction_dual=dual)


@LOSSES.register("GSPO")
def gspo(inputs: LossInputs) -> LossOutput:
    """Compute the clipped surrogate with one ratio per sequence: the geometric mean of the ratios of its tokens.

    Each token's ratio has the value s of its sequence and the gradient s·∇logp of the token, so that advantages may differ
    within a sequence. `dual_clip` is not used, as in the paper.
    """
    log_probs = zero_padding(inputs.log_probs, inputs.mask)
    per_token = zero_padding(log_probs.detach() - inputs.proximal_log_probs, inputs.mask)
    # The value is that of the sequence, the gradient that of the token: the bracket is 0 with slope 1.
    sequence = sequence_mean(per_token, inputs.mask)[:, None] + (log_probs - log_probs.detach())
    ratio = sequence.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss, metrics = _clipped_surrogate(ratio, zero_padding(inputs.advantages, inputs.mask), inputs)
    return _output(loss, inputs, **metrics)


@LOSSES.register("CISPO")
def cispo(inputs: LossInputs) -> LossOutput:
    """Compute REINFORCE with each token weighted by its clipped ratio (CISPO, arXiv:2506.13585).

    A token whose ratio is clipped keeps its gradient, with a bounded weight. The paper has no lower bound; here clip_low
    applies too (as in verl): set it near 1 for the form in the paper.
    """
    ratio = log_ratio(inputs.log_probs, inputs.proximal_log_probs, inputs.mask).detach().exp()
    low, high = 1 - inputs.clip_low, 1 + inputs.clip_high
    weighted = ratio.clamp(low, high) * zero_padding(inputs.advantages, inputs.mask)
    loss = -weighted * zero_padding(inputs.log_probs, inputs.mask)
    return _output(loss, inputs, ratio=ratio, clip_fraction_low=ratio < low, clip_fraction_high=ratio > high)


@LOSSES.register("GPG")
def gpg(inputs: LossInputs) -> LossOutput:
    """Compute the plain policy gradient, without ratio or clip. Off-policy tokens need a correction that weighs them."""
    loss = -zero_padding(inputs.advantages, inputs.mask) * zero_padding(inputs.log_probs, inputs.mask)
    ratio = log_ratio(inputs.log_probs, inputs.proximal_log_probs, inputs.mask).exp()
    never = torch.zeros_like(loss)
    return _output(loss, inputs, ratio=ratio, clip_fraction_low=never, clip_fraction_high=never)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    low, high = 1 - inputs.clip_low, 1 + inputs.clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    # The maximum is pessimistic: the low bound affects negative advantages only, the high bound positive ones only.
    return loss, {
        "ratio": ratio,
        "clip_fraction_low": (advantages < 0) & (ratio < low),
        "clip_fraction_high": (advantages > 0) & (ratio > high),
    }


def _output(loss: Tensor, inputs: LossInputs, **per_token: Tensor) -> LossOutput:
    metrics = {name: token_sum(value.detach(), inputs.mask) for name, value in per_token.items()}
    return LossOutput(per_token=loss, metrics=metrics)
