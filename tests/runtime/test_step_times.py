"""How long the steps of a replica take: counted per report, averaged per replica."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_trainer.pipeline.replica_times import ReplicaTimes
from qwen35_trainer.rollout.rollout_engine import StepOutput
from qwen35_trainer.runtime.step_times import DecodeSum, MeasuredSteps, PrefillSum, StepLog, StepTimes
from tests.profiles import examples


def decoded(sequences: int) -> StepOutput:
    return StepOutput(tokens=sequences)


def prefilled(tokens: int, sequences: int = 0) -> StepOutput:
    return StepOutput(tokens=sequences, prefilled=tokens, prefills=True)


def log_of(*steps: tuple[StepOutput, float]) -> MeasuredSteps:
    """The report of a log that has seen steps of every kind before."""
    log = StepLog()
    for output, _ in steps:
        log.add(output, 1e9)
    log.take()
    for output, seconds in steps:
        log.add(output, seconds)
    return log.take()


def test_steps_are_summed_by_powers_of_two_and_those_that_prefill_apart():
    measured = log_of(
        (decoded(4), 0.1), (decoded(7), 0.2), (decoded(8), 0.4), (prefilled(90, 5), 1.0), (prefilled(10), 0.5)
    )
    assert measured.decode == (DecodeSum(2, 11, pytest.approx(0.3)), DecodeSum(1, 8, 0.4))
    assert measured.prefill == PrefillSum(2, 5, 100, 1.5)


def test_a_report_contains_the_steps_since_the_previous_one():
    log = StepLog()
    for _ in range(3):
        log.add(decoded(2), 0.5)
    assert log.take() == MeasuredSteps((DecodeSum(2, 4, 1.0),)), "the first may have compiled the model"
    assert log.take() == MeasuredSteps()


def test_a_stall_changes_the_usual_duration_by_little_and_a_lasting_change_is_followed():
    log = StepLog()
    for seconds in [60.0, *[0.01] * 2000, 30.0]:
        log.add(decoded(2), seconds)
    [stalled] = log.take().decode
    assert stalled.seconds == pytest.approx(2004 * 0.01)
    for _ in range(2000):
        log.add(decoded(2), 1.0)
    [slower] = log.take().decode
    assert slower.seconds > 1000


def test_a_step_without_sequences_does_not_count():
    log = StepLog()
    log.add(decoded(0), 3.0)
    log.add(decoded(0), 3.0)
    assert log.take() == MeasuredSteps()


def test_prefill_takes_what_its_steps_take_longer_than_decoding():
    times = StepTimes()
    times.add(log_of((decoded(4), 0.1), (prefilled(100, 4), 0.6)))
    assert times.changed() == ReplicaTimes(((4.0, 0.1),), prefill_seconds_per_token=pytest.approx(0.005))


def test_prefill_is_not_measured_before_decoding_and_is_never_negative():
    times = StepTimes()
    times.add(log_of((prefilled(100, 4), 0.6)))
    assert times.changed() is None
    times.add(log_of((decoded(4), 1.0)))
    times.add(log_of((prefilled(100, 4), 0.6)))
    assert times.changed() == ReplicaTimes(((4.0, 1.0),))


def test_the_coordinator_hears_of_changes_by_a_tenth_and_of_other_numbers_of_sequences():
    times = StepTimes()
    times.add(MeasuredSteps((DecodeSum(10, 40, 1.0),)))
    assert times.changed() == ReplicaTimes(((4.0, 0.1),))
    times.add(MeasuredSteps((DecodeSum(10, 40, 1.01),)))
    assert times.changed() is None
    times.add(MeasuredSteps((DecodeSum(1, 16, 0.3),)))
    assert times.changed().steps[-1] == (16.0, 0.3)
    times.add_hand_over(2.0)
    assert times.changed().hand_over_seconds == 2.0


def test_a_replica_that_becomes_slower_is_soon_seen_to_be():
    times = StepTimes()
    for _ in range(100):
        times.add(MeasuredSteps((DecodeSum(50, 200, 5.0),)))
    for _ in range(20):
        times.add(MeasuredSteps((DecodeSum(50, 200, 10.0),)))
    assert times.changed().steps[0][1] == pytest.approx(0.2, rel=0.01)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70_000), st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=60))
def test_averages_stay_few_ascend_and_lie_between_the_measured_ones(steps):
    times = StepTimes()
    for sequences, count, seconds in steps:
        times.add(MeasuredSteps((DecodeSum(count, count * sequences, count * seconds),)))
    averages = times.changed().steps
    assert len(averages) <= 17
    numbers = [sequences for sequences, _ in averages]
    assert numbers == sorted(set(numbers))
    lowest, highest = (of(seconds for *_, seconds in steps) for of in (min, max))
    assert all(lowest - 1e-9 <= seconds <= highest + 1e-9 for _, seconds in averages)
