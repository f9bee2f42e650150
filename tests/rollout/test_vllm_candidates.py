"""Candidates from the log-probabilities that vLLM returns, without vLLM."""

import math

import numpy as np
import pytest

from qwen35_trainer.manifest.rollout import MAX_VLLM_TOP_K
from qwen35_trainer.rollout.rollout_engine import Sampling
from qwen35_trainer.rollout.vllm_candidates import (
    MAX_RETURNED_TOKENS,
    TIED_TOKENS,
    CandidateRecord,
    returned_tokens,
)
from qwen35_trainer.rollout.vllm_requests import NewTokens


def returned(*positions: list[tuple[int, float]]) -> NewTokens:
    """For each position the drawn token and its probability, then the most likely tokens."""
    ids = np.array([[token for token, _ in position] for position in positions], np.int32)
    probabilities = np.array([[probability for _, probability in position] for position in positions], np.float32)
    with np.errstate(divide="ignore"):
        return NewTokens("0-0", ids[:, 0].tolist(), ids, np.log(probabilities), None)


def test_dropped_tokens_are_left_out_and_the_drawn_one_counts_once() -> None:
    record = CandidateRecord()
    log_probs = record.add(
        returned([(7, 0.25), (9, 0.75), (7, 0.25), (1, 0.0)], [(4, 1.0), (4, 1.0), (3, 0.0), (2, 0.0)])
    )
    assert log_probs == pytest.approx([math.log(0.25), 0.0])
    record.add(returned([(5, 0.5), (2, 0.5), (5, 0.5)]))
    assert (record.since(0).counts.tolist(), record.since(0).ids.tolist()) == ([2, 1, 2], [7, 9, 4, 2, 5])
    assert (record.since(2).counts.tolist(), record.since(2).ids.tolist()) == ([2], [2, 5])
    assert len(record.since(3)) == 0


def test_where_more_tokens_are_tied_than_returned_the_drawn_one_is_compared_with_the_returned_ones() -> None:
    """Ten tokens of probability 0.1, of which three and the drawn one are returned."""
    record = CandidateRecord()
    [log_prob] = record.add(returned([(9, 0.1), (0, 0.1), (1, 0.1), (2, 0.1)]))
    assert record.since(0).ids.tolist() == [0, 1, 2, 9]
    assert log_prob == pytest.approx(math.log(0.25))


def test_all_tokens_that_can_be_kept_or_tied_are_returned() -> None:
    vocabulary = 248_320
    assert returned_tokens(Sampling(0.7), vocabulary) == 0
    assert returned_tokens(Sampling(0.0, 0.5, 9, 0.1), vocabulary) == 0  # greedy
    assert returned_tokens(Sampling(0.7, 0.75, 20), vocabulary) == 20 + TIED_TOKENS
    assert returned_tokens(Sampling(0.7, top_k=MAX_VLLM_TOP_K), vocabulary) == MAX_RETURNED_TOKENS
    assert returned_tokens(Sampling(0.7, 0.75, 20), 23) == 23
    assert returned_tokens(Sampling(0.7, 0.75), 23) == 23


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(min_p=0.1), Sampling(top_k=MAX_VLLM_TOP_K + 1)])
def test_a_number_of_candidates_without_a_bound_is_refused(sampling) -> None:
    with pytest.raises(ValueError, match=rf"top-k {sampling.top_k}: .* needs rollout.topK from 1 to 512"):
        returned_tokens(sampling, 248_320)
