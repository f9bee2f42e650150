"""How often anything may be written for one training."""

from datetime import UTC, datetime, timedelta

from qwen35_operator.reconcile.write_pace import BURST, PERIOD_SECONDS, WritePace

NOON, KEY = datetime(2026, 1, 1, 12, tzinfo=UTC), ("team", "demo")


def full_burst(pace: WritePace) -> None:
    for _ in range(BURST):
        assert pace.wait(KEY, NOON) == 0
        pace.wrote(KEY, NOON)


def test_after_a_burst_one_write_is_allowed_per_period() -> None:
    pace = WritePace()
    full_burst(pace)
    assert pace.wait(KEY, NOON) == PERIOD_SECONDS
    assert pace.wait(KEY, NOON + timedelta(seconds=1)) == PERIOD_SECONDS - 1
    later = NOON + timedelta(seconds=PERIOD_SECONDS)
    assert pace.wait(KEY, later) == 0
    pace.wrote(KEY, later)
    assert pace.wait(KEY, later) == PERIOD_SECONDS


def test_a_training_does_not_wait_for_the_writes_of_another() -> None:
    pace = WritePace()
    full_burst(pace)
    assert pace.wait(("team", "other"), NOON) == 0


def test_a_clock_that_is_set_back_neither_stops_writes_nor_frees_them() -> None:
    pace = WritePace()
    full_burst(pace)
    for earlier in (NOON - timedelta(seconds=2), NOON - timedelta(hours=1)):
        assert pace.wait(KEY, earlier) == PERIOD_SECONDS
        pace.wrote(KEY, earlier)
        assert pace.wait(KEY, earlier) == PERIOD_SECONDS
        assert pace.wait(KEY, earlier + timedelta(seconds=PERIOD_SECONDS)) == 0


def test_full_buckets_take_no_memory() -> None:
    pace = WritePace()
    for number in range(1000):
        pace.wrote(("team", str(number)), NOON + timedelta(seconds=number))
    assert len(pace._full) <= PERIOD_SECONDS + 1
