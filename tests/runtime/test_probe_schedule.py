"""Which versions get a probe: it may cost the train ranks little time, or the time in which they would wait."""

import numpy as np
import pytest

from qwen35_trainer.runtime.probe_schedule import PROBE_SHARE, ProbeSchedule


@pytest.fixture
def schedule() -> ProbeSchedule:
    return ProbeSchedule((np.array([3, 4, 5], np.int32),), limit=0.1)


def test_the_first_version_gets_a_probe(schedule: ProbeSchedule) -> None:
    assert schedule.is_due(0.0, waited=0.0)


def test_versions_without_a_probe_are_counted_once(schedule: ProbeSchedule) -> None:
    assert schedule.take_skipped() == 0
    schedule.skip()
    schedule.skip()
    assert (schedule.take_skipped(), schedule.take_skipped()) == (2, 0)


def test_trainers_that_never_wait_compute_probes_for_one_percent_of_their_time(schedule: ProbeSchedule) -> None:
    now, computed = 0.0, 0.0
    for _ in range(5000):  # updates of 10 s, a version after each, and 4 s for each probe
        now += 10.0
        if schedule.is_due(now, waited=0.0):
            schedule.computed(now, now + 4.0)
            now, computed = now + 4.0, computed + 4.0
    assert 0.9 * PROBE_SHARE <= computed / now <= PROBE_SHARE


def test_every_version_gets_a_probe_while_trainers_wait_longer_for_batches_than_it_takes(
    schedule: ProbeSchedule,
) -> None:
    schedule.computed(0.0, 4.0)
    assert schedule.is_due(14.0, waited=4.0)
    assert not schedule.is_due(14.0, waited=3.9)
