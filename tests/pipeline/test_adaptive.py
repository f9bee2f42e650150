"""Adaptive dispatch: when it holds prompts back, and when it lets go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.adaptive import AdaptiveDispatch, LengthHistogram
from qwen35_trainer.pipeline.window import Window

WINDOW = Window(groups_per_batch=10, batches_per_version=1, staleness_threshold=2.0, max_version_lag=3)


def seen(adaptive: AdaptiveDispatch, *, source: str = "", lengths: list[int], batches: int) -> None:
    """Groups of these lengths, each of which took `batches` batches."""
    for number, length in enumerate(lengths, 1000):
        adaptive.dispatched(number, source, 0)
        adaptive.finished(number, length, batches)


def test_lengths_remember_what_lies_beyond_a_length_and_forget():
    lengths = LengthHistogram()
    for tokens in (100, 100, 100, 1000):
        lengths.add(tokens)
    assert lengths.weight_above(200) == pytest.approx(1.0)
    assert lengths.weight_above(50) == pytest.approx(4.0)
    assert lengths.weight_above(2000) == 0.0
    lengths.decay(0.5)
    assert lengths.weight_above(50) == pytest.approx(2.0)


def test_before_any_group_has_finished_nothing_is_predicted():
    adaptive = AdaptiveDispatch(WINDOW)
    adaptive.dispatched(0, "", 0)
    assert adaptive.expected_late(0) == 0.0
    adaptive.trained(1, idle=False)
    assert adaptive.limit == WINDOW.limit


def test_a_group_is_late_with_the_share_of_lengths_that_outlast_its_deadline():
    """A sequence grows 100 tokens a batch; of 4 lengths one takes 10 batches, and the deadline leaves 4."""
    adaptive = AdaptiveDispatch(WINDOW)
    seen(adaptive, lengths=[100, 100, 100], batches=0)
    seen(adaptive, lengths=[1000], batches=10)
    speed = 1300 / (10.5 + 3 * 0.5)
    assert 100 < speed < 120
    adaptive.dispatched(0, "", 0)
    assert adaptive.expected_late(0) == pytest.approx(0.25)


def test_a_group_that_has_lived_long_is_judged_by_the_lengths_that_are_still_possible():
    adaptive = AdaptiveDispatch(WINDOW)
    seen(adaptive, lengths=[100, 100, 100], batches=0)
    seen(adaptive, lengths=[1000], batches=10)
    adaptive.dispatched(0, "", 0)
    assert adaptive.expected_late(2) == pytest.approx(1.0), "only the long one is left"


@pytest.mark.parametrize(("length", "batches", "late"), [(350, 3, 0.0), (450, 4, 1.0)])
def test_a_group_that_finishes_during_its_last_legal_batch_is_not_late(length, batches, late):
    """A sequence grows 100 tokens a batch; the last legal batch, 3, ends when it has 400."""
    adaptive = AdaptiveDispatch(WINDOW)
    seen(adaptive, lengths=[length], batches=batches)
    adaptive.dispatched(0, "", 0)
    assert adaptive.expected_late(0) == pytest.approx(late)


def test_each_data_source_has_its_own_lengths():
    adaptive = AdaptiveDispatch(WINDOW)
    seen(adaptive, source="short", lengths=[100] * 4, batches=1)
    seen(adaptive, source="long", lengths=[4000] * 4, batches=40)
    adaptive.dispatched(0, "short", 0)
    assert adaptive.expected_late(0) == 0.0
    adaptive.dispatched(1, "long", 0)
    assert adaptive.expected_late(0) == pytest.approx(1.0)
    adaptive.dispatched(2, "new", 0)
    assert adaptive.expected_late(0) == pytest.approx(1.0), "nothing is known of it"


def test_it_holds_back_while_groups_would_be_late_and_lets_go_when_slots_idle():
    adaptive = AdaptiveDispatch(WINDOW)
    seen(adaptive, lengths=[4000] * 4, batches=40)
    for group in range(20):
        adaptive.dispatched(group, "", 0)
    adaptive.trained(1, idle=True)
    assert adaptive.limit == 18, "of those in flight, nine tenths"
    for group in range(20):
        adaptive.left(group)
    adaptive.trained(2, idle=False)
    assert adaptive.limit == 18
    adaptive.trained(3, idle=True)
    assert adaptive.limit == 20
    for _ in range(20):
        adaptive.trained(4, idle=True)
    assert adaptive.limit == WINDOW.limit


@given(data=st.data())
def test_the_limit_never_leaves_one_to_the_window(data):
    adaptive = AdaptiveDispatch(WINDOW)
    flying: list[int] = []
    for group in range(data.draw(st.integers(0, 60))):
        adaptive.dispatched(group, data.draw(st.sampled_from(["a", "b"])), group // 10)
        flying.append(group)
        if data.draw(st.booleans()):
            adaptive.finished(flying.pop(0), data.draw(st.integers(1, 100_000)), group // 5)
        if data.draw(st.booleans()):
            adaptive.trained(group // 5, idle=data.draw(st.booleans()))
        assert 1 <= adaptive.limit <= WINDOW.limit
        assert adaptive.expected_late(group // 5) <= len(flying) + 1e-9
