import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from qwen35_trainer.algorithms.advantages import AdvantageInputs, advantage

CENTRED = ["GRPO", "DrGRPO", "RLOO"]
GROUP_RELATIVE = [*CENTRED, "OPO", "PassAtK", "GPG", "ReMax"]
WHITENED = ["ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "GAE"]
EVERY = [*GROUP_RELATIVE, *WHITENED]


def inputs(rewards, group=None, mask=None, **fields):
    """The first sample of each group is the greedy one."""
    rewards = torch.tensor(rewards)
    group = [0] * len(rewards) if group is None else group
    fields.setdefault("baseline", torch.tensor([number not in group[:at] for at, number in enumerate(group)]))
    return AdvantageInputs(
        rewards=rewards,
        group=torch.tensor(group),
        mask=torch.ones(len(rewards), 1) if mask is None else torch.tensor(mask),
        **fields,
    )


# Group 7 is 2, 4, 6 (mean 4, unbiased std 2), group 3 is 1, 0 (mean 1/2, unbiased std 1/√2); they arrive mixed.
MIXED = {"rewards": [2.0, 1.0, 4.0, 0.0, 6.0], "group": [7, 3, 7, 3, 7]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GRPO", [-1.0, math.sqrt(0.5), 0.0, -math.sqrt(0.5), 1.0]),
        ("DrGRPO", [-2.0, 0.5, 0.0, -0.5, 2.0]),
        # 2 - (4 + 6)/2 = -3, 4 - (2 + 6)/2 = 0, 6 - (2 + 4)/2 = 3; 1 - 0 = 1, 0 - 1 = -1.
        ("RLOO", [-3.0, 1.0, 0.0, -1.0, 3.0]),
    ],
)
def test_samples_are_compared_within_their_group(name, expected):
    assert_close(advantage(name)(inputs(**MIXED))[:, 0], torch.tensor(expected), atol=3e-6, rtol=0)


def test_groups_with_signal_make_up_for_those_without():
    """Three groups have scores, one of them has signal: α = 3 / (3 - 2). Nothing of group 5 could be scored."""
    rewards = [2.0, 0.0, 1.0, 1.0, 0.0, 9.0, 9.0]
    valid = torch.tensor([True] * 5 + [False] * 2)
    result = advantage("GPG")(inputs(rewards, group=[7, 7, 3, 3, 4, 5, 5], valid=valid))
    assert result[:, 0].tolist() == [3, -3, 0, 0, 0, 0, 0]


def test_a_response_that_does_not_train_counts_with_its_length():
    """The second half reached the length limit (algorithm.maskTruncated). arXiv:2505.23585, equation of the baseline."""
    lengths = torch.tensor([500, 500, 2048, 2048])
    result = advantage("OPO")(inputs([1.0, 1.0, 0.0, 0.0], mask=[[1], [1], [0], [0]], lengths=lengths))
    assert_close(result[:, 0], torch.tensor([1 - 1000 / 5096] * 2 + [0.0] * 2), atol=1e-6, rtol=0)


def test_every_trained_token_of_a_sequence_gets_its_advantage_and_padding_gets_zero():
    result = advantage("DrGRPO")(inputs([1.0, 3.0], mask=[[1, 0, 1], [1, 0, 0]]))
    assert result.tolist() == [[-1, 0, -1], [1, 0, 0]]
    assert result.dtype == torch.float32


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
def test_a_group_of_equal_rewards_gives_exactly_zero(name, reward, size):
    assert advantage(name)(inputs([reward] * size)).count_nonzero() == 0


@pytest.mark.parametrize("name", WHITENED)
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
def test_a_batch_of_equal_returns_gives_exactly_zero(name, reward, size):
    batch = inputs([reward] * size, mask=[[1, 1]] * size, values=torch.zeros(size, 2))
    assert advantage(name)(batch).count_nonzero() == 0


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_of_one_gives_zero_and_not_its_reward(name):
    assert advantage(name)(inputs([5.0, 1.0, 2.0], group=[0, 1, 1]))[0].item() == 0


def test_a_sample_without_a_score_has_no_advantage_and_is_not_in_the_mean():
    valid = torch.tensor([True, False, True])
    result = advantage("DrGRPO")(inputs([1.0, math.nan, 3.0], valid=valid))
    assert result[:, 0].tolist() == [-1, 0, 1]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_with_one_scored_sample_gives_zero(name):
    valid = torch.tensor([True, False, False])
    assert advantage(name)(inputs([1.0, math.inf, 3.0], valid=valid)).count_nonzero() == 0


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_without_any_score_gives_zero(name):
    batch = inputs([math.nan] * 2, values=torch.ones(2, 1), valid=torch.zeros(2, dtype=torch.bool))
    assert advantage(name)(batch).count_nonzero() == 0


def test_a_sample_without_a_score_is_not_in_the_statistics_that_whiten():
    valid = torch.tensor([True, False, True])
    result = advantage("ReinforcePlusPlus")(inputs([0.0, 100.0, 2.0], valid=valid))
    # Two values whiten to ±1/√2 whatever they are.
    assert_close(result[:, 0], torch.tensor([-math.sqrt(0.5), 0.0, math.sqrt(0.5)]))


def test_group_relative_scores_are_less_the_sequence_s_penalty():
    penalty = torch.tensor([[0.1, 0.1], [0.4, math.nan]])
    # 1 - 0.2 = 0.8 and 1 - 0.4 = 0.6 around 0.7; the NaN stands on padding.
    result = advantage("DrGRPO")(inputs([1.0, 1.0], mask=[[1, 1], [1, 0]], token_penalty=penalty))
    assert_close(result, torch.tensor([[0.1, 0.1], [-0.1, 0.0]]))


def test_reinforce_discounts_the_reward_back_and_whitens_over_tokens():
    # Returns with γ = 1/2: 1, 2 and 1, mean 4/3, unbiased variance (1 + 4 + 1)/9/2 = 1/3.
    result = advantage("ReinforcePlusPlus")(inputs([2.0, 1.0], mask=[[1, 1], [1, 0]], gamma=0.5))
    low, high = -1 / 3 * math.sqrt(3), 2 / 3 * math.sqrt(3)
    assert_close(result, torch.tensor([[low, high], [low, 0.0]]))


def test_a_tool_s_tokens_take_no_time_and_let_the_reward_through():
    result = advantage("ReinforcePlusPlus")(inputs([2.0, 1.0], mask=[[1, 0, 1], [1, 0, 0]], gamma=0.5))
    low, high = -1 / 3 * math.sqrt(3), 2 / 3 * math.sqrt(3)
    assert_close(result, torch.tensor([[low, 0.0, high], [low, 0.0, 0.0]]))


def test_reinforce_pays_each_token_s_penalty_where_it_stands():
    # Rewards 0, 0 - 1, 3: returns 2, 2, 3, mean 7/3, variance (1 + 1 + 4)/9/2 = 1/3.
    penalty = torch.tensor([[0.0, 1.0, 0.0]])
    result = advantage("ReinforcePlusPlus")(inputs([3.0], mask=[[1, 1, 1]], token_penalty=penalty))
    assert_close(result, torch.tensor([[-1.0, -1.0, 2.0]]) / 3 * math.sqrt(3))


@pytest.mark.parametrize("hole", [False, True])
def test_gae_weighs_temporal_differences_and_whitens(hole):
    # γ = λ = 1/2, reward 3 at the end. δ = ½·2 - 1 = 0, ½·4 - 2 = 0, 3 - 4 = -1; A = -1/16, -1/4, -1.
    # Mean -7/16, deviations (6, 3, -9)/16, unbiased variance (36 + 9 + 81)/256/2, so (6, 3, -9)/√63.
    mask, values, where = [[1, 1, 1]], [[1.0, 2.0, 4.0]], [0, 1, 2]
    if hole:
        mask, values, where = [[1, 0, 1, 1, 0]], [[1.0, math.nan, 2.0, 4.0, math.inf]], [0, 2, 3]
    result = advantage("GAE")(inputs([3.0], mask=mask, values=torch.tensor(values), gamma=0.5, lam=0.5))
    expected = torch.zeros(len(mask[0]))
    expected[where] = torch.tensor([6.0, 3.0, -9.0]) / math.sqrt(63)
    assert_close(result[0], expected)


def test_gae_without_values_is_refused():
    with pytest.raises(ValueError, match="values is None: GAE needs a value per token"):
        advantage("GAE")(inputs([1.0]))


def test_remax_without_greedy_samples_is_refused():
    with pytest.raises(ValueError, match="baseline is None: ReMax needs to know the greedy sample of each group"):
        advantage("ReMax")(inputs([1.0], baseline=None))


def test_a_greedy_sample_without_a_score_is_not_a_baseline():
    valid = torch.tensor([False, True, True, True])
    result = advantage("ReMax")(inputs([math.nan, 3.0, 2.0, 5.0], group=[0, 0, 1, 1], valid=valid))
    assert result[:, 0].tolist() == [0, 0, 0, 3]


def test_all_wrong_inputs_are_named_together():
    with pytest.raises(ValueError, match="advantage inputs: ") as refused:
        inputs(
            [1.0, 2.0], group=[0, 0, 0], baseline=None, valid=torch.ones(1, dtype=torch.bool), values=torch.zeros(2, 7)
        )
    assert str(refused.value) == (
        "advantage inputs: group has shape (3,), the mask of shape (2, 1) requires (2,); "
        "valid has shape (1,), the mask of shape (2, 1) requires (2,); "
        "values has shape (2, 7), the mask of shape (2, 1) requires (2, 1)."
    )
    with pytest.raises(ValueError, match=r"^advantage inputs: mask has shape \(2,\), expected \(N, T\)\.$"):
        inputs([1.0, 2.0], mask=[1, 1])


def test_numbers_that_are_not_finite_are_refused_where_they_would_count():
    penalty, values = torch.tensor([[0.0, math.nan]]), torch.tensor([[math.inf, 0.0]])
    with pytest.raises(ValueError, match="advantage inputs: ") as refused:
        inputs([math.nan], mask=[[1, 0]], token_penalty=penalty, values=values)
    assert str(refused.value) == (
        "advantage inputs: rewards holds nan, exclude samples without a score by `valid`; "
        "values holds inf, exclude samples without a score by `valid`."
    )


batches = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-8, 8).map(lambda r: r / 4), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)


@pytest.mark.parametrize("name", CENTRED)
@given(batch=batches)
def test_the_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_the_order(name, batch):
    rewards, group, order = batch
    result = advantage(name)(inputs(rewards, group))[:, 0]
    shuffled = advantage(name)(inputs([rewards[i] for i in order], [group[i] for i in order]))[:, 0]
    assert_close(shuffled, result[list(order)])
    for g in set(group):
        assert abs(sum(a for a, h in zip(result.tolist(), group, strict=True) if h == g)) < 1e-4


@given(batch=batches)
def test_rloo_is_the_distance_to_the_mean_of_the_others(batch):
    rewards, group, _ = batch
    result = advantage("RLOO")(inputs(rewards, group))[:, 0].tolist()
    for i, got in enumerate(result):
        others = [rewards[j] for j in range(len(rewards)) if group[j] == group[i] and j != i]
        assert got == pytest.approx(rewards[i] - sum(others) / len(others) if others else 0, abs=1e-5)


@given(rewards=st.lists(st.integers(0, 4).map(float), min_size=2, max_size=8), width=st.integers(1, 5))
def test_whitened_advantages_have_mean_zero_and_variance_one(rewards, width):
    result = advantage("ReinforcePlusPlus")(inputs(rewards, mask=[[1] * width] * len(rewards)))
    assert result.mean().item() == pytest.approx(0, abs=1e-5)
    assert result.var().item() == pytest.approx(1 if len(set(rewards)) > 1 else 0, abs=1e-4)
