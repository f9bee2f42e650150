"""Advantages: how much better each token was than expected.

    scores of all samples, tokens of this rank's share (TrainedTokens) ─► estimator ─► advantages of these tokens
                                                                             └─► sums over shares (Shares)

A share is the part of a batch's samples that a train rank computes. Every rank has the scores of all samples, so it
computes group means on its own. Three kinds of sums need tokens of other ranks, and are therefore added up over all
shares: each sample's penalties, each sample's number of trained tokens, and the mean and variance that whiten a batch.

name                       advantage of a token, R the sample's score                          mean and std over
GRPO                       (R - mean) / (std + 1e-6)                                           its group
DrGRPO                     R - mean                                                            its group
RLOO                       R - mean of the group's other samples                               its group
OPO                        R - weighted mean of its group, weights: the samples' lengths       its group
ReMax                      R - score of its group's greedy sample                              its group
PassAtK                    maximum of the group - maximum of its other samples                 its group
GPG                        α·(R - mean), α: groups / groups whose scores differ                its group; α: the batch
ReinforcePlusPlus          sum of the discounted rewards from the token on, whitened           the batch's tokens
ReinforcePlusPlusBaseline  R - mean of its group, whitened                                     the batch's tokens
GAE                        λ-weighted temporal differences of a value function, whitened       the batch's tokens

The estimators deviate from the textbook formulas in three ways:
- All estimators except ReinforcePlusPlus and GAE give exactly 0, before whitening, in a group with zero variance (all
  scores are equal) and in a group with a single valid sample. GRPO's usual formula gives rounding noise divided by 1e-6
  in a group with zero variance; for a single sample, common implementations give the raw reward. A group with zero
  variance still takes a place in its batch, unless `algorithm.dynamicSampling` leaves the group out
  (pipeline/coordinator.py, `_scored`).
- All estimators give 0 to a sample that could not be scored (`valid` false), and leave it out of every statistic.
- ReinforcePlusPlus and GAE count only trained tokens as time steps. Other tokens, such as a tool's output, count
  neither for the discount nor for λ, and rewards flow back across them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qwen35_trainer.algorithms.registry import Registry

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole batch of N scored samples with up to T response tokens each: the argument of an advantage function.

    Advantage functions that a user provides have this argument, too. The constructor raises ValueError for wrong
    fields. The message names every field of a wrong shape or, if all shapes are right, every field with a value
    that is not finite.
    """

    rewards: Tensor
    """(N,) reward of each sample. The reward of a sample that is not valid is ignored."""
    group: Tensor
    """(N,) int64 number of each sample's prompt. Only equality matters: samples of one prompt have the same number."""
    mask: Tensor
    """(N, T) 1 for tokens that train, 0 for all others."""
    token_penalty: Tensor | None = None
    """(N, T) number to subtract from each token's reward: the KL penalty times its coefficient. None: no penalty.
    Group-relative estimators subtract the sum of a sample's penalties from the sample's reward."""
    values: Tensor | None = None
    """(N, T) expected return before each token, as a value function predicts it. Only GAE needs it; None otherwise."""
    gamma: float = 1.0
    """Discount per token, which ReinforcePlusPlus and GAE use."""
    lam: float = 1.0
    """GAE's λ. With 1, an advantage depends on all later rewards; with 0, only on the next reward and the next value."""
    valid: Tensor | None = None
    """(N,) bool, false for samples that could not be scored. None: all samples were scored."""
    baseline: Tensor | None = None
    """(N,) bool, true for the greedy sample of each group. The greedy sample does not train. Only ReMax needs this
    field; None otherwise."""
    lengths: Tensor | None = None
    """(N,) number of response tokens of each sample, whether they train or not. None: the number of those that train."""

    def __post_init__(self) -> None:
        _raise(_wrong_shapes(self))
        valid = _valid(self)
        counted = self.mask.bool() & valid[:, None]
        _raise(_not_finite(self.rewards[valid], self.token_penalty, self.values, counted))


class Shares(Protocol):
    """Sums and maxima over all train ranks, each of which has one share of the batch's samples.

    Both methods are collective: all ranks must make the same calls in the same order.
    """

    def sum(self, values: Tensor) -> Tensor:
        """Return the element-wise sum of the tensors `values` of all ranks. Every rank gets this sum.

        values: a tensor in host memory, with one shape on all ranks.
        """
        ...

    def max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum of the tensors `values` of all ranks. Every rank gets this maximum.

        values: a tensor in host memory, with one shape on all ranks.
        """
        ...


class OneShare:
    """The `Shares` of a batch that is not divided: `sum` and `max` return their argument."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True)
class TrainedTokens:
    """The argument of an estimator: the scores of all N samples of a batch, and R trained tokens.

    The R tokens are the trained tokens of one rank's share of the samples, concatenated. The constructor raises
    ValueError if a field has a value that is not finite; the message names all these fields.
    """

    rewards: Tensor
    """(N,) reward of each sample. The reward of a sample that is not valid is ignored."""
    group: Tensor
    """(N,) int64 number of each sample's prompt. Samples of one prompt have the same number."""
    valid: Tensor
    """(N,) bool, false for samples that could not be scored."""
    lengths: Tensor
    """(N,) number of response tokens of each sample, whether they train or not."""
    sample: Tensor
    """(R,) int64 index of each token's sample in 0 … N - 1. Tokens of a sample are adjacent and in order."""
    token_penalty: Tensor | None = None
    """(R,) number to subtract from each token's reward; None: no penalty."""
    values: Tensor | None = None
    """(R,) expected return before each token, as a value function predicts it. Only GAE needs it; None otherwise."""
    gamma: float = 1.0
    lam: float = 1.0
    baseline: Tensor | None = None
    """(N,) bool, true for the greedy sample of each group. Only ReMax needs it; None otherwise."""

    def __post_init__(self) -> None:
        counted = self.valid[self.sample]
        _raise(_not_finite(self.rewards[self.valid], self.token_penalty, self.values, counted))


type AdvantageFunction = Callable[[AdvantageInputs], Tensor]
type AdvantageEstimator = Callable[[TrainedTokens, Shares], Tensor]

ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage")


def estimator(name: str) -> AdvantageEstimator:
    """Return the estimator registered as `name`.

    An estimator maps (TrainedTokens, Shares) to the advantages of the R trained tokens, (R,) float32. Raises ValueError
    if the name is unknown.
    """
    return ADVANTAGES.get(name)


def advantage(name: str) -> AdvantageFunction:
    """Return a function that applies the estimator `name` to a whole batch of N samples with T response positions.

    The function maps AdvantageInputs to advantages, (N, T) float32, which are 0 where the mask is 0. Raises ValueError
    if the name is unknown.
    """
    estimate = ADVANTAGES.get(name)

    def of_whole_batch(inputs: AdvantageInputs) -> Tensor:
        mask = inputs.mask.bool()
        table = torch.zeros(mask.shape)
        table[mask] = estimate(_trained_tokens(inputs), OneShare())
        return table

    return of_whole_batch


def _trained_tokens(inputs: AdvantageInputs) -> TrainedTokens:
    mask = inputs.mask.bool()
    return TrainedTokens(
        rewards=inputs.rewards,
        group=inputs.group,
        valid=_valid(inputs),
        lengths=mask.sum(dim=1) if inputs.lengths is None else inputs.lengths,
        sample=mask.nonzero()[:, 0],
        token_penalty=None if inputs.token_penalty is None else inputs.token_penalty[mask],
        values=None if inputs.values is None else inputs.values[mask],
        gamma=inputs.gamma,
        lam=inputs.lam,
        baseline=inputs.baseline,
    )


@ADVANTAGES.register("GRPO")
def grpo(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return (score - mean) / (std + 1e-6) of each token's sample (GRPO, arXiv:2402.03300).

    mean and std: of the scores of the sample's group; std is the unbiased standard deviation.
    """
    groups = _compare_in_groups(tokens, shares)
    return (groups.centred / (groups.std + STD_EPSILON))[tokens.sample]


@ADVANTAGES.register("DrGRPO")
def dr_grpo(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return, for each token, the score of its sample minus the mean score of the group (Dr. GRPO, arXiv:2503.20783).

    Unlike GRPO, Dr. GRPO does not divide by the group's standard deviation: the division would give more weight to
    prompts whose samples have nearly equal scores.
    """
    return _compare_in_groups(tokens, shares).centred[tokens.sample]


@ADVANTAGES.register("RLOO")
def rloo(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return, for each token, the score of its sample minus the mean score of the other samples of the group.

    This is the leave-one-out baseline (RLOO, arXiv:2402.14740). In a group of n valid samples with the mean score m,
    the result is (score - m)·n/(n-1).
    """
    groups = _compare_in_groups(tokens, shares)
    return (groups.centred * groups.size / (groups.size - 1).clamp(min=1))[tokens.sample]


@ADVANTAGES.register("OPO")
def opo(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return, for each token, the score of its sample minus a weighted mean of the group's
    scores (OPO, arXiv:2505.23585).

    The weight of a sample is its number of response tokens, also if they do not train, as after algorithm.maskTruncated.
    This baseline minimises the variance of the gradient if the squared norm of a sample's gradient is proportional to the
    sample's length.
    """
    groups, lengths = _compare_in_groups(tokens, shares), tokens.lengths.double()
    # `centred` instead of the scores, so that equal scores give exactly 0.
    weighted = groups.reduce(groups.centred.double() * lengths, "sum") / groups.reduce(lengths, "sum").clamp(min=1)
    return torch.where(tokens.valid, groups.centred - weighted, 0.0).float()[tokens.sample]


@ADVANTAGES.register("ReMax")
def re_max(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return, for each token, the score of its sample minus the score of the group's greedy
    sample (ReMax, arXiv:2310.10505).

    The greedy sample has no trained tokens, so token penalties do not lower its score. If it could not be scored, all
    samples of its group get 0. Raises ValueError if `tokens.baseline`, which marks the greedy samples, is None.
    """
    if tokens.baseline is None:
        raise ValueError(
            "baseline is None: ReMax needs to know the greedy sample of each group. Pass baseline, or use RLOO."
        )
    groups, scores = _compare_in_groups(tokens, shares), _scores(tokens, shares)
    greedy = tokens.baseline & tokens.valid
    of_greedy = groups.reduce(torch.where(greedy, scores, 0.0), "sum")
    compared = tokens.valid & (groups.reduce(greedy.float(), "sum") == 1)
    return torch.where(compared, scores - of_greedy, 0.0)[tokens.sample]


@ADVANTAGES.register("PassAtK")
def pass_at_k(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return how much each token's sample raises the maximum score of its group (arXiv:2503.19595, with k the
    size of the group).

    If one sample scores higher than all others of its group, its advantage is the distance to the second-best score.
    All other samples get 0. If several samples share the maximum, the whole group gets 0. verl's `grpo_passk` also
    divides by the standard deviation.
    """
    groups = _compare_in_groups(tokens, shares)
    maximum = groups.reduce(groups.centred, "amax")
    best = tokens.valid & (groups.centred == maximum)
    second = groups.reduce(torch.where(best, -torch.inf, groups.centred), "amax")
    alone = best & (groups.reduce(best.float(), "sum") == 1) & (groups.size > 1)
    return torch.where(alone, maximum - second, 0.0)[tokens.sample]


@ADVANTAGES.register("GPG")
def gpg(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return, for each token, α times the difference between the score of its sample and the mean score of the
    group (GPG, arXiv:2504.02546).

    α = B / (B - M) for a batch of B groups, of which M have no signal, because all their scores are equal. These groups
    have no gradient, but count in the mean over the batch, and α makes up for them. Groups without a scored sample count
    in neither B nor M. verl's `gpg` has the number of scores that are not 0 in place of B - M. The paper also draws more
    prompts until the share of groups with signal is above a threshold; algorithm.dynamicSampling replaces all others, and α
    is then 1. If a batch has several updates, α is that of the batch, where the paper has one update per batch.
    """
    centred = _compare_in_groups(tokens, shares).centred
    scored, with_signal = (len(torch.unique(tokens.group[chosen])) for chosen in (tokens.valid, centred != 0))
    return (centred * (scored / max(with_signal, 1)))[tokens.sample]


@ADVANTAGES.register("ReinforcePlusPlus")
def reinforce_plus_plus(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return the discounted sum of rewards from each token to the end of its sample, whitened over the
    batch's trained tokens.

    A sample's reward is added at the sample's last trained token, and each token's penalty is subtracted at
    that token (REINFORCE++, Hu 2025, arXiv:2501.03262).
    """
    return _whiten(_discounted_sum(_token_rewards(tokens), tokens.sample, tokens.gamma), tokens, shares)


@ADVANTAGES.register("ReinforcePlusPlusBaseline")
def reinforce_plus_plus_baseline(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return, for each token, the score of its sample minus the group's mean, whitened over the batch's trained tokens.

    Unlike GRPO, this estimator does not amplify groups of nearly equal scores, because it divides by the standard
    deviation of the batch instead of the group's (REINFORCE++-baseline, arXiv:2501.03262).
    """
    return _whiten(_compare_in_groups(tokens, shares).centred.double()[tokens.sample], tokens, shares)


@ADVANTAGES.register("GAE")
def gae(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return generalised advantage estimates, whitened over the batch's trained tokens (GAE, arXiv:1506.02438 eq. 16).

        advantage_t = Σ_l (γλ)^l δ_{t+l}        δ_t = reward_t + γ·value_{t+1} - value_t

    t counts the trained tokens of a sample; the value after the last trained token is 0. Raises ValueError if
    `tokens.values` is None.
    """
    if tokens.values is None:
        raise ValueError("values is None: GAE needs a value per token. Pass values, or use GRPO, DrGRPO, RLOO.")
    values = tokens.values.double()
    delta = _token_rewards(tokens) - values
    delta[:-1] += tokens.gamma * _following(values, tokens.sample, 1)
    return _whiten(_discounted_sum(delta, tokens.sample, tokens.gamma * tokens.lam), tokens, shares)


@dataclass(frozen=True)
class _Groups:
    """Comparison of each of N samples with the valid samples of its group. All tensors are (N,).

    centred: the score minus the group's mean; 0 for samples that are not valid, and in groups of equal scores.
    std: the standard deviation of the group's scores.
    size: the number of valid samples in the group.
    reduce: a function (values (N,), how) that reduces the values of each group's valid samples by "sum", "mean", "amin"
      or "amax", and returns for each sample the result of its group.
    """

    centred: Tensor
    std: Tensor
    size: Tensor
    reduce: Callable[[Tensor, str], Tensor]


def _compare_in_groups(tokens: TrainedTokens, shares: Shares) -> _Groups:
    scores, valid = _scores(tokens, shares), tokens.valid
    _, index = torch.unique(tokens.group, return_inverse=True)

    def reduce(values: Tensor, how: str) -> Tensor:
        empty = values.new_zeros(len(values))
        return empty.scatter_reduce(0, index[valid], values[valid], how, include_self=False)[index]

    size = reduce(torch.ones_like(scores), "sum")
    centred = scores - reduce(scores, "mean")
    # Scores are compared with each other, because the mean of equal float32 scores may differ from them.
    distinct = valid & (reduce(scores, "amin") < reduce(scores, "amax"))
    centred = torch.where(distinct, centred, 0.0)
    std = (reduce(centred.square(), "sum") / (size - 1).clamp(min=1)).sqrt()
    return _Groups(centred, std, size, reduce)


def _scores(tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Return the score of each of N samples, (N,) float32: the reward minus the sample's penalties; 0 if the
    sample is not valid.
    """
    scores = tokens.rewards.float()
    if tokens.token_penalty is not None:
        penalties = torch.zeros(len(scores), dtype=torch.float64)
        penalties.index_add_(0, tokens.sample, tokens.token_penalty.double())
        scores = scores - shares.sum(penalties).float()
    return torch.where(tokens.valid, scores, 0.0)


def _token_rewards(tokens: TrainedTokens) -> Tensor:
    """Return the reward of each of R trained tokens, (R,) float64.

    It is the sample's reward at the last trained token of the sample and 0 at all others, minus the token's penalty.
    """
    sample = tokens.sample
    last = torch.ones_like(sample, dtype=torch.bool)
    last[:-1] = sample[:-1] != sample[1:]
    reward = torch.where(tokens.valid, tokens.rewards.double(), 0.0)
    rewards = torch.where(last, reward[sample], 0.0)
    return rewards if tokens.token_penalty is None else rewards - tokens.token_penalty.double()


def _discounted_sum(values: Tensor, sample: Tensor, discount: float) -> Tensor:
    """Return Σ_l discount^l · values_{t+l} over the tokens of the same sample, for each of R tokens, (R,).

    Each round doubles the number of tokens that every sum covers (Hillis and Steele 1986), so a sample of T tokens
    takes log2(T) rounds. No factor is above 1, and nothing is divided by a power of the discount, so nothing overflows.
    """
    sums, factor, distance = values.clone(), discount, 1
    longest = int(torch.unique_consecutive(sample, return_counts=True)[1].max()) if len(sample) else 0
    while distance < longest:
        sums[:-distance] += _following(sums, sample, distance).mul_(factor)
        factor, distance = factor * factor, 2 * distance
    return sums


def _following(values: Tensor, sample: Tensor, distance: int) -> Tensor:
    """Return, for each of R tokens except the last `distance` ones, the value `distance` tokens later
    in the same sample.

    The value is 0 where the sample ends earlier. Shape: (R - distance,).
    """
    return torch.where(sample[distance:] == sample[:-distance], values[distance:], 0.0)


def _whiten(advantages: Tensor, tokens: TrainedTokens, shares: Shares) -> Tensor:
    """Scale the advantages of R tokens to mean 0 and variance 1 (unbiased) over the trained tokens
    of all valid samples.

    advantages: (R,) float64. Returns (R,) float32: 0 for tokens of samples that are not valid, and 0 for every
    token if all advantages are equal. Sums are float64, so that the result does not depend on how the batch is
    divided into shares.
    """
    counted = tokens.valid[tokens.sample]
    selected = advantages[counted]
    bounds = torch.full((2,), -torch.inf, dtype=torch.float64)
    if selected.numel():
        bounds = torch.stack([selected.max(), -selected.min()])
    largest, negated_smallest = shares.max(bounds).tolist()
    count, total = shares.sum(torch.stack([counted.double().sum(), selected.sum()])).tolist()
    if count == 0 or largest == -negated_smallest:
        return torch.zeros_like(advantages, dtype=torch.float32)
    mean = total / count
    variance = shares.sum((selected - mean).square().sum()) / (count - 1)
    return torch.where(counted, (advantages - mean) * (variance + WHITEN_EPSILON).rsqrt(), 0.0).float()


def _wrong_shapes(inputs: AdvantageInputs) -> list[str]:
    if inputs.mask.dim() != 2:
        return [f"mask has shape {tuple(inputs.mask.shape)}, expected (N, T)"]
    per_token, per_sample = tuple(inputs.mask.shape), (len(inputs.mask),)
    expected = {
        "rewards": (inputs.rewards, per_sample),
        "group": (inputs.group, per_sample),
        "valid": (inputs.valid, per_sample),
        "baseline": (inputs.baseline, per_sample),
        "lengths": (inputs.lengths, per_sample),
        "token_penalty": (inputs.token_penalty, per_token),
        "values": (inputs.values, per_token),
    }
    return [
        f"{name} has shape {tuple(tensor.shape)}, the mask of shape {per_token} requires {shape}"
        for name, (tensor, shape) in expected.items()
        if tensor is not None and tuple(tensor.shape) != shape
    ]


def _valid(inputs: AdvantageInputs) -> Tensor:
    return torch.ones_like(inputs.rewards, dtype=torch.bool) if inputs.valid is None else inputs.valid.bool()


def _not_finite(rewards: Tensor, penalty: Tensor | None, values: Tensor | None, counted: Tensor) -> list[str]:
    """Return one message for each argument that contains a value that is not finite.

    counted: bool, in the shape of `penalty` and `values`; entries where it is false are not checked.
    """
    entries = {
        "rewards": rewards,
        "token_penalty": None if penalty is None else penalty[counted],
        "values": None if values is None else values[counted],
    }
    return [
        f"{name} holds {tensor[~tensor.isfinite()][0].item()}, exclude samples without a score by `valid`"
        for name, tensor in entries.items()
        if tensor is not None and not tensor.isfinite().all()
    ]


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("advantage inputs: " + "; ".join(problems) + ".")
