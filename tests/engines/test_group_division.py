"""Which samples share their prompt in a micro-batch, and which rank computes them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.engines.batch_division import BatchDivision
from qwen35_trainer.engines.micro_batch import Offsets, micro_batch
from qwen35_trainer.engines.train_batch import TrainBatch

GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=8
)


def batch_of(groups: list[tuple[int, list[int]]]) -> TrainBatch:
    """Group → number of tokens of its prompt, and of each response. The tokens of a prompt count from 100 times the group."""
    prompts = [100 * number + np.arange(prompt) for number, (prompt, all_) in enumerate(groups) for _ in all_]
    lengths = np.array([response for _, all_ in groups for response in all_])
    return TrainBatch(
        prompts=np.concatenate(prompts).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        responses=10_000 + np.arange(lengths.sum(), dtype=np.int32),
        response_lengths=lengths,
        trainable=np.ones(lengths.sum(), dtype=np.bool_),
        log_probs=np.zeros(lengths.sum(), dtype=np.float32),
        rewards=np.zeros(len(lengths), dtype=np.float32),
        group=np.array([number for number, (_, all_) in enumerate(groups) for _ in all_]),
    )


def tokens_of(batch: TrainBatch, samples: np.ndarray) -> int:
    """Tokens of a micro-batch in which each prompt is once."""
    assert batch.group is not None
    prompts = {batch.group[n]: batch.prompt_lengths[n] for n in samples}
    return int(sum(prompts.values()) + batch.response_lengths[samples].sum())


def division(shares: int, **settings: int) -> BatchDivision:
    return replace(BatchDivision(shares, packed=True, share_prompts=True), **settings)


@given(groups=GROUPS, shares=st.integers(1, 4), budget=st.integers(1, 200))
def test_a_token_budget_counts_a_prompt_once_and_yields_only_to_a_single_sample(groups, shares, budget) -> None:
    batch = batch_of(groups)
    planned = division(shares, max_tokens=budget).micro_batches(batch, np.arange(batch.samples))
    assert len({len(share) for share in planned}) == 1
    assert sorted(np.concatenate([part for share in planned for part in share])) == list(range(batch.samples))
    assert all(len(part) <= 1 or tokens_of(batch, part) <= budget for share in planned for part in share)


@given(groups=GROUPS, shares=st.integers(1, 4), sequences=st.integers(2, 7))
def test_a_limit_of_samples_holds(groups, shares, sequences) -> None:
    batch = batch_of(groups)
    planned = division(shares, sequences=sequences).micro_batches(batch, np.arange(batch.samples))
    assert sorted(np.concatenate([part for share in planned for part in share])) == list(range(batch.samples))
    assert all(len(part) <= sequences for share in planned for part in share)


@given(groups=GROUPS, shares=st.integers(1, 4), budget=st.none() | st.integers(1, 200))
def test_driver_and_ranks_agree_on_the_samples_of_a_share(groups, shares, budget) -> None:
    batch = batch_of(groups)
    own = division(shares, sequences=3, max_tokens=budget)
    for number, share in enumerate(own.shares_of(batch)):
        planned = own.micro_batches(share, np.arange(batch.samples))[number]
        assert sorted(np.concatenate(planned).tolist()) == share.held_samples.tolist()


def test_whole_groups_stay_together_while_ranks_have_equal_work() -> None:
    batch = batch_of([(10, [5, 5, 5])] * 4)
    planned = division(2, max_tokens=60).micro_batches(batch, np.arange(12))
    assert batch.group is not None
    assert [[sorted(set(batch.group[part].tolist())) for part in share] for share in planned] == [[[0, 2]], [[1, 3]]]
    assert division(2, max_tokens=60).saved_tokens(batch, np.arange(12)) == 4 * 2 * 10


def test_a_group_that_is_too_large_is_divided_and_each_part_has_its_own_prompt() -> None:
    batch = batch_of([(10, [9, 8, 7, 6, 5])])
    [share] = division(1, max_tokens=28).micro_batches(batch, np.arange(5))
    assert [part.tolist() for part in share] == [[2, 3, 4], [0, 1]]
    assert division(1, max_tokens=28).saved_tokens(batch, np.arange(5)) == 3 * 10


def test_one_group_is_divided_over_ranks_that_would_wait_for_it() -> None:
    batch = batch_of([(2, [10, 10, 10, 10])])
    planned = division(2, max_tokens=100).micro_batches(batch, np.arange(4))
    assert [[len(part) for part in share] for share in planned] == [[2], [2]]


def test_a_prompt_longer_than_the_equal_share_of_a_rank_is_shared() -> None:
    """With a rank for each sample, every rank would compute two prompts, and two ranks without work are better."""
    batch = batch_of([(40, [2, 2, 2, 2])] * 2)
    planned = division(4, max_tokens=200).micro_batches(batch, np.arange(8))
    assert sorted(tokens_of(batch, part) for share in planned for part in share if len(part)) == [48, 48]
    assert division(4, max_tokens=200).saved_tokens(batch, np.arange(8)) == 2 * 3 * 40


def test_a_prompt_above_the_budget_shares_nothing() -> None:
    batch = batch_of([(50, [3, 2])])
    [share] = division(1, max_tokens=40).micro_batches(batch, np.arange(2))
    assert [len(part) for part in share] == [1, 1]
    assert division(1, max_tokens=40).saved_tokens(batch, np.arange(2)) == 0


def test_the_row_has_a_prompt_once_and_scores_the_first_token_of_every_response_at_its_end() -> None:
    batch = batch_of([(2, [3, 1, 2]), (1, [2])])
    micro = micro_batch(
        batch,
        Offsets.of(batch),
        np.array([0, 3, 1, 2]),
        None,
        packed=True,
        share_prompts=True,
        device=torch.device("cpu"),
    )
    assert micro.inputs.tokens.tolist() == [[0, 1, 10_000, 10_001, 100, 10_006, 10_004]]
    assert micro.inputs.positions[0, :, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert micro.inputs.boundaries is not None
    assert micro.inputs.boundaries.tolist() == [0, 2, 4, 6, 7]
    assert micro.rows.tolist() == [1, 2, 3, 4, 5, 1, 1, 6]
    assert micro.targets.tolist() == [10_000, 10_001, 10_002, 10_006, 10_007, 10_003, 10_004, 10_005]
    assert micro.lengths.tolist() == [4, 2, 2, 3]


def test_samples_of_one_group_have_one_prompt() -> None:
    batch = batch_of([(2, [3, 1])])
    other = replace(batch, prompts=np.array([0, 1, 0, 7], dtype=np.int32))
    with pytest.raises(AssertionError, match="different prompts"):
        micro_batch(
            other, Offsets.of(other), np.arange(2), None, packed=True, share_prompts=True, device=torch.device("cpu")
        )
