"""Policy losses per token, before the weights of a correction and the aggregation are applied.

With r = exp(log_probs - proximal_log_probs), A the advantage and sg the stop-gradient:

name          loss of a token                                          source
PPOClip       max(-A·r, -A·clip(r)); for A < 0 at most -A·dual_clip    arXiv:1707.06347 eq. 7; dual clip: arXiv:1912.09729
GSPO          max(-A·s, -A·clip(s)), s the sequence's ratio            arXiv:2507.18071, in its form GSPO-token
CISPO         -sg(clip(r))·A·log_probs                                 arXiv:2506.13585 (MiniMax-M1)
GPG           -A·log_probs                                             arXiv:2504.02546
SAPO          -A·4/τ·sigmoid(τ·(r - 1)), τ by the sign of A            arXiv:2511.20347
DPPOBinaryTV  -A·r, or 0 outside of the trust region                   arXiv:2602.04879, divergence |π - μ|
DPPOBinaryKL  -A·r, or 0 outside of the trust region                   arXiv:2602.04879, divergence KL(μ ‖ π) per token

clip(r) = clamp(r, 1 - clip_low, 1 + clip_high). π is the token's probability under the current policy, and μ its
probability under the policy in the denominator of r. Where both policies are the same, r = 1 and each loss of the table
has the gradient -A·∇logp. In DPPO, a token is outside of the trust region if its divergence is above a limit and the step
would increase the divergence further.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35_trainer.algorithms.masking import sequence_mean, token_sum, zero_padding
from qwen35_trainer.algorithms.ratio import MAX_LOG_RATIO, log_ratio
from qwen35_trainer.algorithms.registry import Registry

MAX_BINARY_TV = 0.15
"""Default maximum divergence of DPPO with total variation, as in the paper (arXiv:2602.04879)."""
MAX_BINARY_KL = 0.05
"""Default maximum divergence of DPPO with KL, in nats, as in the paper (arXiv:2602.04879)."""
MAX_DPPO_RATIO = 20.0
"""Maximum ratio with which DPPO weighs a token, where the paper has none.

verl's loss truncates at `clip_ratio_c`, or at 20 without it. verl's actor settings have 3, which is meant for dual-clip
PPO: it would truncate the rare tokens that DPPO is to set free. The authors' script for verl sets 10000, so that nothing
is truncated. 20 bounds the loss of a token with a negative advantage and is close to the paper.
"""
MIN_PROBABILITY = 1e-8
"""Lower bound of the summed probability of all tokens other than the sampled one. verl has the same bound."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the policy loss of one micro-batch: N sequences of up to T tokens.

    Sequences are whole, because GSPO has one ratio per sequence.
    """

    log_probs: Tensor
    """(N, T) log-probability of each sampled token under the policy that trains; the only field with gradient."""
    proximal_log_probs: Tensor
    """(N, T) log-probability of each sampled token under the policy in the denominator of the ratio r.

    With the correction None, this is the behaviour policy. With every other correction, it is the
    proximal policy (objective.py)."""
    advantages: Tensor
    """(N, T) advantage of each token."""
    mask: Tensor
    """(N, T) 1 on tokens that train."""
    clip_low: float
    """A ratio below 1 - clip_low is clipped to 1 - clip_low."""
    clip_high: float
    """A ratio above 1 + clip_high is clipped to 1 + clip_high."""
    dual_clip: float | None
    """Ratio above which PPOClip gives no gradient to a token with a negative advantage. None: no such bound."""
    tau_positive: float = 1.0
    """SAPO's τ for tokens with a positive advantage. The larger τ is, the faster a token's gradient falls as
    r moves away from 1."""
    tau_negative: float = 1.05
    """SAPO's τ for tokens with a negative advantage."""
    max_divergence: float | None = None
    """Divergence above which DPPO gives a token no gradient that would increase the divergence.
    None: the paper's value."""


@dataclass(frozen=True)
class LossOutput:
    """Losses of the tokens of one micro-batch (N sequences of up to T tokens), and sums for metrics."""

    per_token: Tensor
    """(N, T) loss of each token, 0 on padding."""
    metrics: dict[str, Tensor]
    """Scalar sums over the trained tokens. The caller adds them up over micro-batches and ranks, and divides by
    the number of tokens.

    ratio: sum of the tokens' ratios.
    clip_fraction_low, clip_fraction_high, clip_fraction_dual: number of tokens that the lower, upper or
      dual bound clips."""


type LossFunction = Callable[[LossInputs], LossOutput]

LOSSES: Registry[LossFunction] = Registry("loss")


def policy_loss(name: str) -> LossFunction:
    """Return the loss registered as `name`: LossInputs -> LossOutput. Raises ValueError if the name is unknown."""
    return LOSSES.get(name)


@LOSSES.register("PPOClip")
def ppo_clip(inputs: LossInputs) -> LossOutput:
    """Compute PPO's clipped surrogate loss (arXiv:1707.06347 eq. 7).

    If `dual_clip` is set, the loss of a token with a negative advantage is at most -advantage
    · dual_clip (arXiv:1912.09729).
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
    """Compute the clipped surrogate with one ratio s per sequence: the geometric mean of the ratios of its tokens.

    Each token's ratio has the value s and the gradient s·∇logp of that token, so that advantages may differ within a
    sequence (GSPO-token, arXiv:2507.18071). `dual_clip` is not used, as in the paper.
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

    A token whose ratio is clipped keeps its gradient, with a bounded weight. The paper has no lower bound. Here,
    `clip_low` sets one, as in verl; a `clip_low` near 1 gives the paper's form.
    """
    ratio = log_ratio(inputs.log_probs, inputs.proximal_log_probs, inputs.mask).detach().exp()
    low, high = 1 - inputs.clip_low, 1 + inputs.clip_high
    weighted = ratio.clamp(low, high) * zero_padding(inputs.advantages, inputs.mask)
    loss = -weighted * zero_padding(inputs.log_probs, inputs.mask)
    return _output(loss, inputs, ratio=ratio, clip_fraction_low=ratio < low, clip_fraction_high=ratio > high)


@LOSSES.register("GPG")
def gpg(inputs: LossInputs) -> LossOutput:
    """Compute the plain policy gradient, -advantage · log-prob, without ratio or clipping (GPG, arXiv:2504.02546).

    The paper's factor α, for groups without signal, belongs to the advantage GPG; with other advantages, α is 1. Off-policy
    tokens need a correction that weighs them, because the loss has no ratio.
    """
    loss = -zero_padding(inputs.advantages, inputs.mask) * zero_padding(inputs.log_probs, inputs.mask)
    ratio = log_ratio(inputs.log_probs, inputs.proximal_log_probs, inputs.mask).exp()
    never = torch.zeros_like(loss)
    return _output(loss, inputs, ratio=ratio, clip_fraction_low=never, clip_fraction_high=never)


@LOSSES.register("SAPO")
def sapo(inputs: LossInputs) -> LossOutput:
    """Compute the surrogate with a soft gate in place of clipping (Soft Adaptive
    Policy Optimization, arXiv:2511.20347).

    The gate 4/τ·sigmoid(τ·(r - 1)) has slope 1 at the ratio r = 1, and its slope falls smoothly to 0 on both sides.
    With a larger τ, the slope falls faster. The paper uses a larger τ for negative advantages, where a step raises the
    probability of many other tokens. The paper averages within sequences first: use the aggregation
    SequenceMeanTokenMean for its form.
    """
    advantages = zero_padding(inputs.advantages, inputs.mask)
    ratio = log_ratio(inputs.log_probs, inputs.proximal_log_probs, inputs.mask).exp()
    # Not `torch.where` on two numbers, which would round them to float32.
    tau = torch.full_like(advantages, inputs.tau_negative).masked_fill(advantages > 0, inputs.tau_positive)
    return _output(-advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)), inputs, ratio=ratio)


@LOSSES.register("DPPOBinaryTV")
def dppo_binary_tv(inputs: LossInputs) -> LossOutput:
    """Compute DPPO's loss with the total variation distance as divergence (arXiv:2602.04879).

    The distance is between the current policy and the policy in the denominator of the ratio, each reduced to a
    distribution over two events: the sampled token, and any other token.
    """
    log_current, log_old = _sampled_log_probs(inputs)
    divergence = (log_current.exp() - log_old.exp()).abs()
    return _divergence_masked(divergence, inputs, MAX_BINARY_TV)


@LOSSES.register("DPPOBinaryKL")
def dppo_binary_kl(inputs: LossInputs) -> LossOutput:
    """Compute DPPO's loss with KL(old policy ‖ current policy), in nats, as divergence (arXiv:2602.04879).

    The old policy is the policy in the denominator of the ratio. Each policy is reduced to a distribution over two
    events: the sampled token, and any other token.
    """
    log_current, log_old = _sampled_log_probs(inputs)
    log_ratio_of_old = -log_ratio(log_current, log_old, inputs.mask)
    # 1 - p by expm1, because a probability near 1 would cancel; bounded below so that the logarithm is finite.
    other_current, other_old = ((-torch.expm1(each)).clamp(min=MIN_PROBABILITY) for each in (log_current, log_old))
    divergence = log_old.exp() * log_ratio_of_old + other_old * (other_old.log() - other_current.log())
    return _divergence_masked(divergence, inputs, MAX_BINARY_KL)


def _sampled_log_probs(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the sampled tokens under the current and under the old policy, without gradient.

    Both are (N, T), N sequences of up to T tokens.
    """
    current, old = (
        zero_padding(values, inputs.mask).clamp(max=0)
        for values in (inputs.log_probs.detach(), inputs.proximal_log_probs)
    )
    return current, old


def _divergence_masked(divergence: Tensor, inputs: LossInputs, default: float) -> LossOutput:
    """Compute -A·r, with 0 for tokens that have left the trust region and would move further away from it.

    divergence: (N, T) divergence of the current and the old policy at each token.
    default: the maximum divergence δ if `inputs.max_divergence` is None.

    The paper's loss is -M·r·A. Its mask M is 0 where the divergence is above δ and either A > 0 and r > 1, or A < 0 and
    r < 1. Here r is also truncated to MAX_DPPO_RATIO, without changing the direction of the gradient, because nothing
    else bounds the loss of a token with a negative advantage.
    """
    advantages = zero_padding(inputs.advantages, inputs.mask)
    log_r = log_ratio(inputs.log_probs, inputs.proximal_log_probs, inputs.mask)
    ratio = log_r.detach().exp()
    outside = divergence > (default if inputs.max_divergence is None else inputs.max_divergence)
    high, low = outside & (advantages > 0) & (ratio > 1), outside & (advantages < 0) & (ratio < 1)
    log_probs = zero_padding(inputs.log_probs, inputs.mask)
    # The value is that of the ratio, the gradient that of the log-prob: the bracket is 1 with slope 1.
    surrogate = ratio.clamp(max=MAX_DPPO_RATIO) * (1 + log_probs - log_probs.detach())
    loss = torch.where(high | low, 0.0, -advantages * surrogate)
    return _output(loss, inputs, ratio=ratio, clip_fraction_low=low, clip_fraction_high=high)


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
