"""Which rank computes which samples together."""

import sys
from types import FrameType
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.engines.batch_division import plan

LENGTHS = st.lists(st.integers(2, 300), min_size=1, max_size=60).map(np.array)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), sequences=st.integers(1, 9))
def test_every_sample_is_computed_once_and_every_rank_has_as_many_micro_batches(lengths, ranks, sequences) -> None:
    shares = plan(lengths, ranks, sequences=sequences)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    assert sorted(np.concatenate([part for share in shares for part in share]).tolist()) == list(range(len(lengths)))
    assert all(len(part) <= sequences for share in shares for part in share)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 800))
def test_a_token_budget_counts_the_padding_and_yields_only_to_a_single_sample(lengths, ranks, budget) -> None:
    shares = plan(lengths, ranks, sequences=1, max_tokens=budget)
    assert len({len(share) for share in shares}) == 1
    assert sorted(np.concatenate([part for share in shares for part in share]).tolist()) == list(range(len(lengths)))
    for share in shares:
        for part in share:
            assert len(part) <= 1 or len(part) * lengths[part].max() <= budget


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 800))
def test_a_token_budget_of_packed_samples_counts_no_padding(lengths, ranks, budget) -> None:
    shares = plan(lengths, ranks, sequences=1, max_tokens=budget, packed=True)
    assert len({len(share) for share in shares}) == 1
    assert sorted(np.concatenate([part for share in shares for part in share]).tolist()) == list(range(len(lengths)))
    for share in shares:
        filled = [int(lengths[part].sum()) for part in share if len(part)]
        assert all(tokens <= budget or len(part) == 1 for tokens, part in zip(filled, share, strict=False))
        # Two micro-batches that would fit into one were not kept apart.
        assert sum(2 * tokens <= budget for tokens in filled) <= 1


@given(lengths=LENGTHS, budget=st.integers(1, 800))
def test_each_packed_sample_is_in_the_first_micro_batch_that_has_room(lengths, budget) -> None:
    expected: list[list[int]] = []
    for sample in np.argsort(-lengths, kind="stable").tolist():
        fitting = [cut for cut in expected if lengths[[*cut, sample]].sum() <= budget]
        if fitting:
            fitting[0].append(sample)
        else:
            expected.append([sample])
    [share] = plan(lengths, 1, sequences=1, max_tokens=budget, packed=True)
    assert [part.tolist() for part in share] == expected


def test_packing_four_times_as_many_samples_takes_about_four_times_as_many_steps() -> None:
    """Also when no two samples fit together, so that every micro-batch before is too full for each sample."""
    few, many = (lines_executed(np.full(count, 60)) for count in (256, 1024))
    assert many < 6 * few


def lines_executed(lengths: np.ndarray) -> int:
    """The number of lines of Python that packing into micro-batches of 100 tokens executes."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan(lengths, 1, sequences=1, max_tokens=100, packed=True)
    finally:
        sys.settrace(before)
    return lines


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_packed_ranks_differ_by_at_most_one_sample_of_tokens(lengths, ranks) -> None:
    shares = plan(lengths, ranks, sequences=1, max_tokens=500, packed=True)
    work = [sum(int(lengths[part].sum()) for part in share) for share in shares]
    assert max(work) - min(work) <= lengths.max()


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_ranks_differ_by_at_most_one_sample_and_one_longest_sample_of_work(lengths, ranks) -> None:
    work = [sum(int(lengths[part].sum()) for part in share) for share in plan(lengths, ranks, sequences=4)]
    counts = [sum(len(part) for part in share) for share in plan(lengths, ranks, sequences=4)]
    assert max(counts) - min(counts) <= 1
    assert max(work) - min(work) <= lengths.max()


def test_samples_of_like_length_share_a_micro_batch() -> None:
    [share] = plan(np.array([9, 2, 8, 3, 10, 2]), 1, sequences=2)
    assert [part.tolist() for part in share] == [[4, 0], [2, 3], [1, 5]]


def test_a_rank_without_samples_has_empty_micro_batches() -> None:
    shares = plan(np.array([5]), 3, sequences=2)
    assert [[part.tolist() for part in share] for share in shares] == [[[0]], [[]], [[]]]
