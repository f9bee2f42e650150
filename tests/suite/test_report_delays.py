"""Delays of reports, from what trainers and a watch have noted: benchmarks/report_delays.py."""

import time
from datetime import UTC, datetime

import pytest

from benchmarks.observer import Copy, Observer
from benchmarks.report_delays import (
    Delay,
    at_share,
    checkpoint_delays,
    growth,
    number_delays,
    spread_of,
    windows,
    without,
)


def test_a_checkpoint_is_delayed_from_its_answer_until_it_or_a_later_one_is_shown():
    answered = {12: 100.0, 24: 160.0, 36: 220.0}
    copies = [(100.5, 12), (221.0, 36)]
    assert checkpoint_delays(answered, copies) == [Delay(100.0, 0.5), Delay(160.0, 61.0), Delay(220.0, 1.0)]


def test_a_checkpoint_that_is_shown_before_its_answer_arrives_has_no_delay():
    assert checkpoint_delays({12: 100.0}, [(99.9, 12)]) == [Delay(100.0, 0.0)]


def test_a_checkpoint_that_is_never_shown_has_no_entry():
    assert checkpoint_delays({12: 100.0, 24: 160.0}, [(101.0, 12)]) == [Delay(100.0, 1.0)]


def test_the_first_numbers_are_delayed_from_their_answer():
    assert number_delays({1: 100.0}, [Copy(100.25, 1, 100.0)], interval=10.0) == [Delay(100.0, 0.25)]


def test_numbers_within_the_interval_are_delayed_from_its_end():
    answered = {1: 100.0, 2: 105.0}
    copies = [Copy(100.25, 1, 99.5), Copy(110.0, 2, 105.0)]
    assert number_delays(answered, copies, interval=10.0)[1] == Delay(105.0, 0.5)


def test_numbers_after_the_interval_are_delayed_from_their_answer():
    answered = {1: 100.0, 2: 130.0}
    copies = [Copy(100.25, 1, 100.0), Copy(130.75, 2, 130.0)]
    assert number_delays(answered, copies, interval=10.0)[1] == Delay(130.0, 0.75)


def test_numbers_are_shown_by_a_copy_of_later_ones():
    answered = {1: 100.0, 2: 105.0, 3: 110.5}
    copies = [Copy(100.25, 1, 100.0), Copy(111.0, 3, 110.0)]
    assert number_delays(answered, copies, interval=10.0)[1:] == [Delay(105.0, 1.0), Delay(110.5, 0.5)]


def test_numbers_that_are_copied_before_their_time_or_never_count_as_such():
    answered = {1: 100.0, 2: 105.0, 3: 110.0}
    copies = [Copy(100.25, 1, 100.0), Copy(106.0, 2, 105.0)]
    assert number_delays(answered, copies, interval=10.0) == [Delay(100.0, 0.25), Delay(105.0, 0.0)]


def test_a_window_has_the_reports_that_were_answered_in_it():
    delays = [Delay(1000.0, 0.1), Delay(1299.9, 0.3), Delay(1300.0, 0.5), Delay(1650.0, 0.7)]
    spreads = windows(delays, began=1000.0, seconds=700.0, length=300.0)
    assert [(window["fromSecond"], window["count"], window["max"]) for window in spreads] == [
        (0, 2, 0.3),
        (300, 1, 0.5),
        (600, 1, 0.7),
    ]


def test_a_window_without_reports_has_no_percentiles():
    assert windows([], began=0.0, seconds=60.0, length=60.0) == [{"fromSecond": 0, "count": 0}]


def test_percentiles_are_by_nearest_rank():
    assert spread_of([Delay(0.0, float(number)) for number in range(1, 201)]) == {
        "count": 200,
        "p50": 100.0,
        "p99": 198.0,
        "max": 200.0,
    }


def test_reports_around_the_failover_are_left_out():
    delays = [Delay(at, 1.0) for at in (9.0, 10.0, 15.0, 20.0, 21.0)]
    assert [delay.answered for delay in without(delays, 10.0, 20.0)] == [9.0, 21.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([100, 100, 100], 1.0), ([80, 100, 150, 150, 132, 90], 1.32), ([200, 100, 100, 100, 100, 150], 0.75), ([5], 1.0)],
)
def test_growth_compares_the_maxima_of_the_last_and_the_first_third(values, expected):
    assert growth(values) == pytest.approx(expected)


def test_a_share_of_a_series_is_the_last_value_in_it():
    values = [float(number) for number in range(1, 121)]
    assert [at_share(values, share) for share in (0.1, 0.5, 1.0)] == [12.0, 60.0, 120.0]
    assert at_share([7.0], 0.1) == 7.0


def test_the_watch_notes_each_update_of_a_status_once_with_its_age():
    observer = Observer(session=None, server="", api=None, trainings="", jobs="")
    written = datetime.fromtimestamp(round(time.time()) - 30, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {"state": "Running", "progress": {"update": 4, "time": written}, "pools": [{"ready": 1}, {"ready": 2}]}
    for update in (4, 4, 5):
        progress = {"update": update, "time": written}
        observer.take_training({"metadata": {"name": "t"}, "status": status | {"progress": progress}})
    assert [copy.update for copy in observer.copies["t"]] == [4, 5]
    assert observer.copies["t"][0].at - observer.copies["t"][0].written == pytest.approx(30, abs=1.5)
    assert observer.ready_pods["t"] == 3
