"""Advantages: how much better each token was than expected.

Every train rank computes them for the whole batch and uses the rows of its own samples: group means, and the mean and
variance that whiten a batch, need all samples together.

name               advantage of a token, R the sample's score                                  statistics over
GRPO               (R - mean) / (std + 1e-6)                                                   its group
DrGRPO             R - mean                                                                    its group
RLOO               R - mean of the group's other samples                                       its group
ReinforcePlusPlus  discounted rewards from the token on, whitened                              the batch's tokens
GAE                λ-weighted temporal differences of a value function, whitened               the batch's tokens

All estimators deviate from the textbook formulas in the same way:
- Where samples cannot be distinguished (equal scores, or a single valid one) the advantage is exactly 0. The usual
  formula gives rounding noise over 1e-6 in the first case, and the raw reward in the second. A group of equal scores still
  takes its place in the batch, unless `algorithm.dynamicSampling` leaves it out (pipeline/coordinator.py, `_scored`).
- A sample that could not be scored (`valid` false) gets 0 and enters no statistic.
- Time steps are the tokens that train: neither discount nor λ counts the others (a tool's output), and rewards flow
  back across them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35_trainer.algorithms.masking import sequence_sum, zero_padding
from qwen35_trainer.algorithms.registry import Registry

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole batch of scored samples. Raises ValueError naming every wrong shape, or every field that is not finite."""

    rewards: Tensor
    """(N,) score of each sample; the entry of a sample that is not valid is ignored."""
    group: Tensor
    """(N,) int64, equal for the samples of one prompt; the numbers themselves have no meaning."""
    mask: Tensor
    """(N, T) 1 on tokens that train."""
    token_penalty: Tensor | None = None
    """(N, T) subtracted from each token's reward: KL in the reward, already multiplied by its coefficient.
    Group-relative advantages subtract the sum over a sequence from its reward."""
    values: Tensor | None = None
    """(N, T) expected return before each token; GAE only."""
    gamma: float = 1.0
    """Discount per token; ReinforcePlusPlus and GAE."""
    lam: float = 1.0
    """GAE's λ: 1 trusts only rewards, 0 only values."""
    valid: Tensor | None = None
    """(N,) bool, false for samples that could not be scored; None: all were."""

    def __post_init__(self) -> None:
        problems = _wrong_shapes(self) or _not_finite(self)
        if problems:
            raise ValueError("advantage inputs: " + "; ".join(problems) + ".")


type AdvantageFunction = Callable[[AdvantageInputs], Tensor]

ADVANTAGES: Registry[AdvantageFunction] = Registry("advantage")


def advantage(name: str) -> AdvantageFunction:
    """Return the function registered as `name`: AdvantageInputs -> (N, T) float32, 0 on padding. Raises ValueError if unknown."""
    return ADVANTAGES.get(name)


@ADVANTAGES.register("GRPO")
def grpo(inputs: AdvantageInputs) -> Tensor:
    """Subtract the group's mean from each score, and divide by the group's unbiased std (GRPO, arXiv:2402.03300)."""
    groups = _compare_in_groups(inputs)
    return _spread(groups.centred / (groups.std + STD_EPSILON), inputs)


@ADVANTAGES.register("DrGRPO")
def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """Subtract the group's mean from each score (Dr. GRPO, arXiv:2503.20783).

    The result is not divided by std, because that would favour prompts whose samples have nearly equal scores.
    """
    return _spread(_compare_in_groups(inputs).centred, inputs)


@ADVANTAGES.register("RLOO")
def rloo(inputs: AdvantageInputs) -> Tensor:
    """Subtract the mean of the group's other samples: n/(n-1)·(R - mean) (leave-one-out, arXiv:2402.14740)."""
    groups = _compare_in_groups(inputs)
    return _spread(groups.centred * groups.size / (groups.size - 1).clamp(min=1), inputs)


@ADVANTAGES.register("ReinforcePlusPlus")
def reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor:
    """Compute the discounted return from each token on, whitened over the batch (Hu 2025, arXiv:2501.03262)."""
    # With no values and λ = 1 the temporal differences telescope into the return.
    return _whiten(_temporal_differences(inputs, torch.zeros_like(inputs.mask, dtype=torch.float32), lam=1.0), inputs)


@ADVANTAGES.register("GAE")
def gae(inputs: AdvantageInputs) -> Tensor:
    """Compute generalised advantage estimates (arXiv:1506.02438 eq. 16), whitened over the batch.

    Raises ValueError without values.
    """
    if inputs.values is None:
        raise ValueError("values is None: GAE needs a value per token. Pass values, or use GRPO, DrGRPO, RLOO.")
    return _whiten(_temporal_differences(inputs, inputs.values, inputs.lam), inputs)


@dataclass(frozen=True)
class _Groups:
    """Each sample (N,) compared with the valid samples of its group.

    `centred` is the score minus the group's mean. It is 0 for samples that are not valid, and in groups of equal
    scores.
    """

    centred: Tensor
    std: Tensor
    size: Tensor


def _compare_in_groups(inputs: AdvantageInputs) -> _Groups:
    scores, valid = _scores(inputs), _valid(inputs)
    _, index = torch.unique(inputs.group, return_inverse=True)

    def reduce(values: Tensor, how: str) -> Tensor:
        empty = values.new_zeros(len(values))
        return empty.scatter_reduce(0, index[valid], values[valid], how, include_self=False)[index]

    size = reduce(torch.ones_like(scores), "sum")
    centred = scores - reduce(scores, "mean")
    # Scores are compared with each other, because the mean of equal float32 scores may differ from them.
    distinct = valid & (reduce(scores, "amin") < reduce(scores, "amax"))
    centred = torch.where(distinct, centred, 0.0)
    std = (reduce(centred.square(), "sum") / (size - 1).clamp(min=1)).sqrt()
    return _Groups(centred, std, size)


def _scores(inputs: AdvantageInputs) -> Tensor:
    """Return (N,) float32: the reward minus the sequence's penalties; 0 for samples that are not valid."""
    scores = inputs.rewards.float()
    if inputs.token_penalty is not None:
        scores = scores - sequence_sum(inputs.token_penalty.float(), inputs.mask)
    return torch.where(_valid(inputs), scores, 0.0)


def _temporal_differences(inputs: AdvantageInputs, values: Tensor, lam: float) -> Tensor:
    """Compute (N, T) Σ_l (γλ)^l δ_{t+l} over trained tokens, δ_t = reward_t + γ·value_{t+1} - value_t, value 0 past the end."""
    trained, values = inputs.mask.bool(), values.float()
    rewards = _token_rewards(inputs)
    following = running = rewards.new_zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + inputs.gamma * following - values[:, t]
        running = torch.where(trained[:, t], delta + inputs.gamma * lam * running, running)
        following = torch.where(trained[:, t], values[:, t], following)
        columns.append(running)
    return torch.stack(columns[::-1], dim=1) if columns else rewards


def _token_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return (N, T) float32: the sample's reward at its last trained token, minus each token's penalty."""
    trained = inputs.mask.bool()
    last = trained & (trained.flip(-1).cumsum(dim=-1).flip(-1) == 1)
    reward = torch.where(_valid(inputs), inputs.rewards.float(), 0.0)
    rewards = torch.where(last, reward[:, None], 0.0)
    return rewards if inputs.token_penalty is None else rewards - zero_padding(inputs.token_penalty.float(), trained)


def _whiten(advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Scale advantages to mean 0 and variance 1 (unbiased) over the trained tokens of valid samples.

    All other tokens get 0. If the advantages of all these trained tokens are equal, they get 0 too.
    """
    counted = inputs.mask.bool() & _valid(inputs)[:, None]
    sample = advantages[counted]
    if sample.numel() == 0 or bool(sample.min() == sample.max()):
        return torch.zeros_like(advantages)
    return zero_padding((advantages - sample.mean()) * (sample.var() + WHITEN_EPSILON).rsqrt(), counted)


def _spread(per_sample: Tensor, inputs: AdvantageInputs) -> Tensor:
    return zero_padding(per_sample[:, None].expand(inputs.mask.shape), inputs.mask)


def _valid(inputs: AdvantageInputs) -> Tensor:
    return torch.ones_like(inputs.rewards, dtype=torch.bool) if inputs.valid is None else inputs.valid.bool()


def _wrong_shapes(inputs: AdvantageInputs) -> list[str]:
    if inputs.mask.dim() != 2:
        return [f"mask has shape {tuple(inputs.mask.shape)}, expected (N, T)"]
    per_token, per_sample = tuple(inputs.mask.shape), (len(inputs.mask),)
    expected = {
        "rewards": (inputs.rewards, per_sample),
        "group": (inputs.group, per_sample),
        "valid": (inputs.valid, per_sample),
        "token_penalty": (inputs.token_penalty, per_token),
        "values": (inputs.values, per_token),
    }
    return [
        f"{name} has shape {tuple(tensor.shape)}, the mask of shape {per_token} requires {shape}"
        for name, (tensor, shape) in expected.items()
        if tensor is not None and tuple(tensor.shape) != shape
    ]


def _not_finite(inputs: AdvantageInputs) -> list[str]:
    valid = _valid(inputs)
    counted = inputs.mask.bool() & valid[:, None]
    entries = {
        "rewards": inputs.rewards[valid],
        "token_penalty": None if inputs.token_penalty is None else inputs.token_penalty[counted],
        "values": None if inputs.values is None else inputs.values[counted],
    }
    return [
        f"{name} holds {tensor[~tensor.isfinite()][0].item()}, exclude samples without a score by `valid`"
        for name, tensor in entries.items()
        if tensor is not None and not tensor.isfinite().all()
    ]
