"""The arithmetic of the two bounds of staleness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.window import Window

windows = st.integers(0, 5).flatmap(
    lambda lag: st.builds(Window, st.integers(1, 64), st.integers(1, 8), st.floats(0, lag), st.just(lag))
)


@pytest.mark.parametrize(
    ("groups", "batches", "threshold", "limit"),
    [
        (32, 1, 0.0, 32),
        (32, 1, 0.5, 48),
        (32, 4, 0.5, 192),
        (4, 1, 0.3, 5),  # 5.2, rounded down
        (10, 1, 0.1, 11),  # 1.1 * 10 in binary fractions is just above 11
        (100, 1, 0.15, 115),  # and 1.15 * 100 just below 115
    ],
)
def test_the_limit_is_one_plus_s_versions_of_groups_rounded_down(groups, batches, threshold, limit):
    assert Window(groups, batches, threshold, 4).limit == limit


def test_a_batch_trains_the_version_of_its_publication_interval():
    window = Window(8, 3, 0.0, 0)
    assert [window.version_of(batch) for batch in range(7)] == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("batches", "lag", "born", "deadline"), [(1, 0, 0, 0), (1, 4, 3, 7), (2, 1, 0, 3), (3, 2, 5, 23)]
)
def test_the_deadline_is_the_last_batch_within_the_lag(batches, lag, born, deadline):
    assert Window(8, batches, 0.0, lag).deadline(born) == deadline


@given(windows, st.integers(0, 1000))
def test_a_group_is_within_the_lag_at_its_deadline_and_beyond_it_one_batch_later(window, born):
    deadline = window.deadline(born)
    assert window.version_of(deadline) - born == window.max_version_lag
    assert window.version_of(deadline + 1) - born == window.max_version_lag + 1


@given(windows)
def test_the_limit_holds_at_least_one_version_and_at_most_what_can_train_in_time(window):
    version = window.groups_per_batch * window.batches_per_version
    assert version <= window.limit <= (1 + window.max_version_lag) * version


@pytest.mark.parametrize(("threshold", "lag"), [(-0.1, 4), (4.1, 4), (0.5, 0), (float("nan"), 4)])
def test_a_count_beyond_the_age_is_refused(threshold, lag):
    with pytest.raises(ValueError, match=rf"stalenessThreshold {threshold} must lie between 0 and maxVersionLag {lag}"):
        Window(8, 1, threshold, lag)
