"""Whether a straggler moves: times in, seconds gained out."""

import math
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qwen35_trainer.pipeline.finished_lengths import MAX_LENGTHS, FinishedLengths
from qwen35_trainer.pipeline.lane_decision import Straggler, gained_seconds, sequence_limit
from qwen35_trainer.pipeline.replica_times import ReplicaTimes
from tests.profiles import examples

EXAMPLES = settings(max_examples=examples(40), deadline=None)
SECONDS = st.floats(0.001, 10)
COUNTS = st.integers(1, 64)
TOKENS = st.integers(0, 100_000)


def linear(base: float, each: float, most: int = 64, **more: float) -> ReplicaTimes:
    """Times of a replica whose step takes `base` and `each` for every sequence."""
    return ReplicaTimes(tuple((float(n), base + each * n) for n in sorted({1, most})), **more)


stragglers = st.builds(Straggler, prompt_tokens=TOKENS, tokens=TOKENS, remaining=st.floats(0, 100_000))
replicas = st.builds(
    lambda base, each, prefill, hand_over: linear(
        base, each, prefill_seconds_per_token=prefill, hand_over_seconds=hand_over
    ),
    SECONDS,
    SECONDS,
    st.floats(0, 1),
    st.floats(0, 10),
)


def test_the_seconds_gained_are_those_of_the_formula():
    here = ReplicaTimes(((8, 0.5),), hand_over_seconds=3.0)
    there = ReplicaTimes(((1, 0.1), (5, 0.3)), prefill_seconds_per_token=0.01)
    straggler = Straggler(prompt_tokens=200, tokens=100, remaining=1000)
    # 1000 tokens in steps of 0.25 s with the fourth sequence instead of 0.5 s; each of three others waits 3 s for the
    # prefill of 300 tokens, as the straggler does, and has steps that are 0.05 s longer.
    assert gained_seconds(straggler, here, there, held=8, taken=3) == pytest.approx(250 - 150 - 12 - 3)


@EXAMPLES
@given(straggler=stragglers, replica=replicas, held=COUNTS, taken=st.integers(0, 64))
def test_nothing_is_gained_on_an_equal_replica_with_as_many_sequences(straggler, replica, held, taken):
    assume(taken + 1 >= held)
    assert gained_seconds(straggler, replica, replica, held=held, taken=taken) <= 1e-9


@EXAMPLES
@given(straggler=stragglers, here=replicas, there=replicas, held=COUNTS, taken=COUNTS, more=st.integers(1, 10_000))
def test_a_longer_prefix_never_gains_more(straggler, here, there, held, taken, more):
    longer = Straggler(straggler.prompt_tokens, straggler.tokens + more, straggler.remaining)
    at = {"held": held, "taken": taken}
    assert gained_seconds(longer, here, there, **at) <= gained_seconds(straggler, here, there, **at) + 1e-6


@EXAMPLES
@given(straggler=stragglers, here=replicas, there=replicas, held=COUNTS, taken=st.integers(0, 62))
def test_a_fuller_lane_never_gains_more(straggler, here, there, held, taken):
    emptier, fuller = (gained_seconds(straggler, here, there, held=held, taken=n) for n in (taken, taken + 1))
    assert fuller <= emptier + 1e-6 * max(1.0, abs(emptier))


@EXAMPLES
@given(straggler=stragglers, here=replicas, there=replicas, held=COUNTS, taken=COUNTS)
def test_what_is_gained_grows_with_what_remains_or_was_never_positive(straggler, here, there, held, taken):
    at = {"held": held, "taken": taken}
    gained = gained_seconds(straggler, here, there, **at)
    longer = Straggler(straggler.prompt_tokens, straggler.tokens, 2 * straggler.remaining + 1)
    assert gained_seconds(longer, here, there, **at) >= gained or gained <= 0


@EXAMPLES
@given(straggler=stragglers, replica=replicas, held=COUNTS, taken=st.integers(0, 64))
def test_a_replica_that_was_not_measured_gives_nothing_and_is_tried_with_one(straggler, replica, held, taken):
    unknown = ReplicaTimes()
    assert gained_seconds(straggler, unknown, replica, held=held, taken=taken) == -math.inf
    assert gained_seconds(straggler, unknown, unknown, held=held, taken=taken) == -math.inf
    assert gained_seconds(straggler, replica, unknown, held=held, taken=taken) == math.inf
    assert sequence_limit(unknown) == 1


@pytest.mark.parametrize(("most", "limit"), [(0.4, 1), (1, 2), (1.6, 3), (48, 96)])
def test_a_lane_takes_twice_as_many_sequences_as_it_was_measured_with(most, limit):
    assert sequence_limit(ReplicaTimes(((most, 1.0),))) == limit


@EXAMPLES
@given(base=SECONDS, each=SECONDS, most=st.integers(2, 64), sequences=st.floats(1, 64))
def test_a_step_between_two_measured_ones_is_interpolated(base, each, most, sequences):
    times = linear(base, each, most)
    assert times.step_seconds(sequences) == pytest.approx(base + each * min(sequences, most))
    assert times.step_seconds(0) == times.step_seconds(1)


def test_a_step_that_was_not_measured_has_no_duration():
    with pytest.raises(ValueError, match="no step of the replica was measured"):
        ReplicaTimes().step_seconds(1)


@EXAMPLES
@given(lengths=st.lists(st.integers(1, 1000), max_size=60), tokens=st.integers(1, 1000), limit=st.integers(1000, 2000))
def test_the_rest_of_a_response_is_that_of_longer_ones_and_of_one_at_the_limit(lengths, tokens, limit):
    finished = FinishedLengths(limit)
    for length in lengths:
        finished.add(length)
    rest = [length - tokens for length in lengths if length > tokens]
    assert finished.remaining(tokens) == pytest.approx(fmean([*rest, limit - tokens]))


def test_only_the_latest_responses_count_and_new_ones_are_used_soon():
    finished = FinishedLengths(100_000)
    for _ in range(MAX_LENGTHS):
        finished.add(50)
    assert finished.remaining(100) == 99_900
    for _ in range(MAX_LENGTHS):
        finished.add(200)
    assert finished.remaining(100) == pytest.approx((100 * MAX_LENGTHS + 99_900) / (MAX_LENGTHS + 1))
    for _ in range(MAX_LENGTHS // 10):
        finished.add(10)
    longer = 0.9 * MAX_LENGTHS
    assert finished.remaining(100) == pytest.approx((100 * longer + 99_900) / (longer + 1), rel=0.01)
