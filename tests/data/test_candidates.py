"""Ragged candidates against a list of lists."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.candidates import Candidates

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8)


def of(lists: list[list[int]]) -> Candidates:
    flat = [token for each in lists for token in each]
    return Candidates(np.array([len(each) for each in lists], np.int32), np.array(flat, np.int32))


def lists_of(candidates: Candidates) -> list[list[int]]:
    ends = np.cumsum(candidates.counts)
    return [
        candidates.ids[end - count : end].tolist() for end, count in zip(ends, candidates.counts.tolist(), strict=True)
    ]


@given(LISTS, st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none())
def test_a_part_has_the_candidates_of_its_tokens(lists, start, end):
    assert lists_of(of(lists)[start:end]) == lists[start:end]


@given(LISTS, st.lists(st.integers(0, 7), max_size=12))
def test_tokens_are_taken_in_any_order_and_number(lists, chosen):
    chosen = [index for index in chosen if index < len(lists)]
    taken = of(lists).take(np.array(chosen, np.int64))
    assert lists_of(taken) == [lists[index] for index in chosen]
    assert taken.counts.dtype == taken.ids.dtype == np.int32


@given(st.lists(LISTS | st.integers(0, 3), max_size=5))
def test_parts_without_truncation_join_as_the_whole_vocabulary(parts):
    """An integer is a part of that many tokens without candidates."""
    untruncated = [isinstance(part, int) for part in parts]
    joined = Candidates.join(
        [None if isinstance(part, int) else of(part) for part in parts],
        [part if isinstance(part, int) else len(part) for part in parts],
    )
    if all(untruncated):
        assert joined is None
    else:
        expected = [each for part in parts for each in ([[]] * part if isinstance(part, int) else part)]
        assert joined is not None
        assert lists_of(joined) == expected


def test_a_pickled_copy_takes_the_same():
    candidates = of([[1, 2], [], [3]])
    assert candidates.starts.tolist() == [0, 2, 2]
    assert lists_of(pickle.loads(pickle.dumps(candidates)).take(np.array([2, 0]))) == [[3], [1, 2]]
