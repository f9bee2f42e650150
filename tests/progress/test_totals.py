"""Totals computed by hand are in test_summary.py, which shows all of them."""

import pytest

from qwen35_trainer.progress.records import CheckpointRecord, EvaluationRecord, FinishRecord
from qwen35_trainer.progress.summary import summarise
from qwen35_trainer.progress.totals import FailureCounts, RunTotals, TimeMean

from .conftest import make_update


def test_a_mean_over_time_weighs_by_duration_and_leaves_out_what_was_not_measured() -> None:
    mean = TimeMean()
    assert mean.value is None
    for value, seconds in ((1.0, 1.0), (None, 100.0), (3.0, 3.0)):
        mean.add(value, seconds)
    assert mean.value == 2.5


def test_the_first_failure_is_the_one_with_the_earliest_time() -> None:
    failures = FailureCounts()
    for time, text in ((5.0, "second"), (3.0, "first"), (9.0, "third")):
        failures.add(make_update(1, time=time, first_reward_error=text, errors_by_reward={"a": 1}))
    assert (failures.first, failures.errors) == ("first", {"a": 3})


def test_a_repeated_update_counts_only_for_the_course_of_time() -> None:
    totals = RunTotals()
    totals.add(make_update(1, time=50.0), repeated=True)
    totals.add(EvaluationRecord(update=1, version=1, time=60.0, samples=1), repeated=True)
    assert (totals.updates, totals.tokens, totals.evaluation, totals.seconds) == (0, 0, None, 60.0)
    totals.add(FinishRecord(outcome="Failed", message="", time=61.0))
    assert totals.finish is not None
    totals.add(make_update(1, time=55.0), repeated=True)
    assert totals.finish is None, "another attempt has begun"


def test_an_evaluation_or_checkpoint_of_an_earlier_version_does_not_lower_the_version() -> None:
    totals = RunTotals()
    totals.add(make_update(4, version=3))
    totals.add(EvaluationRecord(update=2, version=2, time=60.0, samples=1))
    totals.add(CheckpointRecord(update=1, version=1, time=61.0, path="checkpoints/update-1", seconds=0.5))
    assert totals.version == 3
    totals.add(EvaluationRecord(update=4, version=4, time=62.0, samples=1))
    assert totals.version == 4
    totals.add(make_update(3, version=2))
    assert totals.version == 2, "another attempt continues from an earlier version"


def test_the_shares_of_the_parts_are_of_all_time_and_parts_without_time_are_left_out() -> None:
    course = [
        make_update(1, seconds=2.0, seconds_training=1.0, seconds_waiting=0.0, seconds_copying=1.0, seconds_driver=0.0),
        make_update(2, seconds=6.0, seconds_training=6.0, seconds_waiting=0.0, seconds_driver=0.0),
    ]
    shares = summarise(course, max_version_lag=None, peak_rss_mib=None)["trainTime"]
    assert shares == {"training": pytest.approx(7 / 8), "copying": pytest.approx(1 / 8)}
