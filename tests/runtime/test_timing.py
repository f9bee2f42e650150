import pytest

from qwen35_trainer.runtime import measurements as module
from qwen35_trainer.runtime.measurements import PoolMeter, TrainingClock


@pytest.fixture
def time_is(monkeypatch):
    def set_time(second: float) -> None:
        monkeypatch.setattr(module.time, "time", lambda: second)

    set_time(100.0)
    return set_time


def test_idle_is_the_share_of_all_workers_time(time_is):
    meter = PoolMeter(workers=2, _since=100.0)
    meter.add(100.0, 104.0)
    meter.add(101.0, 103.0)
    meter.tokens += 50
    time_is(110.0)
    assert meter.read() == pytest.approx((1 - 6 / 20, 5.0))


def test_each_reading_starts_again_from_zero(time_is):
    meter = PoolMeter(workers=1, _since=100.0)
    meter.add(100.0, 105.0)
    time_is(105.0)
    assert meter.read()[0] == 0.0
    time_is(115.0)
    assert meter.read() == (1.0, 0.0)


def test_work_before_the_last_reading_is_not_counted_twice(time_is):
    meter = PoolMeter(workers=1, _since=100.0)
    time_is(110.0)
    meter.read()
    meter.add(95.0, 108.0)  # all of it before
    meter.add(105.0, 115.0)
    time_is(120.0)
    assert meter.read()[0] == pytest.approx(0.5)


def test_training_time_continues_over_attempts():
    assert TrainingClock(started=1000.0, earlier=60.0).at(1005.0) == 65.0
