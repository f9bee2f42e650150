"""What a batch takes, and what it waits for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.buffer import Batch, Blocked, Buffer, MissedDeadlinePolicy
from qwen35_trainer.pipeline.window import Window


def buffer_of(
    *, groups: int = 2, batches: int = 1, threshold: float = 2.0, lag: int = 2, policy: str = "Wait"
) -> Buffer:
    return Buffer(Window(groups, batches, threshold, lag), MissedDeadlinePolicy(policy))


def dispatch(buffer: Buffer, *groups: int, version: int = 0) -> None:
    for group in groups:
        buffer.dispatch(group, version)


def finish(buffer: Buffer, *groups: int) -> None:
    for group in groups:
        buffer.finish(group)


def at_its_deadline(policy: str) -> Buffer:
    """Batch 2 is next and group 0, of version 0, must go with it; groups 2 and 3, of version 2, could wait."""
    buffer = buffer_of(groups=1, lag=2, policy=policy)
    dispatch(buffer, 0, 1, 2)
    finish(buffer, 1, 2)
    for version in (1, 2):
        assert isinstance(buffer.take(), Batch)
        buffer.publish(version)
    dispatch(buffer, 3, 4, version=2)
    return buffer


def test_groups_leave_in_the_order_of_completion_when_none_is_due():
    buffer = buffer_of()
    dispatch(buffer, 0, 1, 2, 3)
    finish(buffer, 3, 1, 0, 2)
    assert buffer.take() == Batch((3, 1))
    assert buffer.take() == Batch((0, 2))


def test_a_due_group_leaves_before_a_finished_later_one():
    buffer = at_its_deadline("Wait")
    finish(buffer, 4, 3, 0)
    assert buffer.take() == Batch((0,))
    assert buffer.take() == Batch((4,))


def test_a_group_whose_successors_crowd_the_deadline_leaves_early():
    """Deadline 2 for three groups of version 0: one of them must be in each of the batches 0, 1 and 2."""
    buffer = buffer_of(groups=1, threshold=2.0, lag=2)
    dispatch(buffer, 0, 1, 2)
    buffer.born(2, 1)
    buffer.born(0, 0)
    finish(buffer, 2, 0, 1)
    assert buffer.take() == Batch((2,)), "two groups fit into batches 1 and 2"
    assert buffer.take() == Batch((0,))
    assert buffer.take() == Batch((1,))


def test_a_batch_waits_for_its_size():
    buffer = buffer_of(groups=3)
    dispatch(buffer, 0, 1, 2, 3)
    finish(buffer, 1, 3)
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=2, needed=3)


def test_wait_blocks_and_names_the_due_groups():
    buffer = at_its_deadline("Wait")
    finish(buffer, 3, 4)
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=2, needed=1, due=(0,))
    finish(buffer, 0)
    assert buffer.take() == Batch((0,))


def test_wait_names_every_running_group_of_the_earliest_crowded_deadline():
    buffer = buffer_of(groups=2, threshold=0.0, lag=0)
    dispatch(buffer, 0, 1)
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=0, needed=2, due=(0, 1))
    finish(buffer, 0)
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=1, needed=2, due=(1,))


def test_a_birth_from_later_weights_moves_the_deadline():
    buffer = at_its_deadline("Wait")
    finish(buffer, 3)
    buffer.born(0, 1)
    assert buffer.take() == Batch((3,))
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=0, needed=1, due=(0,))


def test_a_birth_reported_after_the_group_left_is_ignored():
    buffer = buffer_of(groups=1)
    dispatch(buffer, 0)
    finish(buffer, 0)
    buffer.take()
    buffer.born(0, 1)
    assert buffer.pending == ()


def test_mask_tokens_continues_without_the_due_group_and_takes_it_first_when_it_finishes():
    buffer = at_its_deadline("MaskTokens")
    finish(buffer, 3)
    assert buffer.take() == Batch((3,))
    finish(buffer, 4, 0)
    assert buffer.take() == Batch((0,))
    assert buffer.take() == Batch((4,))


def test_discard_gives_back_the_group_that_missed_its_deadline():
    buffer = at_its_deadline("Discard")
    finish(buffer, 3)
    assert buffer.take() == Batch((3,), discarded=(0,))
    assert buffer.pending == (4,)


def test_discard_keeps_a_late_group_until_its_last_legal_batch():
    buffer = at_its_deadline("Discard")
    assert buffer.take() is None, "nothing else is ready: the late group may still make it"
    assert buffer.missing() == Blocked(finished=0, needed=1)
    finish(buffer, 0)
    assert buffer.take() == Batch((0,))


def test_discard_also_gives_back_finished_groups_that_no_batch_has_room_for():
    """Four groups of version 0 run through batch 1, of which two should have left with it: batch 2 holds only two."""
    buffer = buffer_of(groups=2, threshold=2.0, lag=2, policy="Discard")
    dispatch(buffer, *range(6))
    finish(buffer, 0, 1)
    assert buffer.take() == Batch((0, 1))
    buffer.publish(1)
    dispatch(buffer, 6, 7, version=1)
    finish(buffer, 6, 7)
    assert buffer.take() == Batch((6, 7))
    finish(buffer, 5, 4, 3, 2)
    assert buffer.take() == Batch((5, 4), discarded=(3, 2))


def test_discarded_groups_make_room():
    buffer = at_its_deadline("Discard")
    finish(buffer, 3)
    room = buffer.room
    buffer.take()
    assert buffer.room == room + 1, "the discarded group counts no longer, the trained one still does"


def test_what_trains_counts_until_its_version_is_published():
    buffer = buffer_of(groups=2, batches=2, threshold=0.5, lag=1)
    dispatch(buffer, *range(6))
    assert (buffer.counted, buffer.room) == (6, 0)
    finish(buffer, 0, 1, 2, 3)
    buffer.take()
    buffer.take()
    assert (buffer.counted, buffer.room) == (6, 0)
    buffer.publish(1)
    assert (buffer.counted, buffer.room) == (2, 4)


def test_a_publication_during_the_next_batch_does_not_uncount_that_batch():
    buffer = buffer_of(groups=2, batches=1, threshold=1.0, lag=1)
    dispatch(buffer, *range(4))
    finish(buffer, *range(4))
    buffer.take()
    buffer.take()  # trains version 1 while version 1 travels
    buffer.publish(1)
    assert (buffer.counted, buffer.room) == (2, 2)
    buffer.publish(2)
    assert (buffer.counted, buffer.room) == (0, 4)


def test_a_full_window_refuses_a_group_by_number_and_count():
    buffer = buffer_of(groups=1, threshold=0.0, lag=0)
    dispatch(buffer, 7)
    with pytest.raises(ValueError, match=r"group 8 dispatched into a full window \(1 of 1\)"):
        buffer.dispatch(8, 0)


def test_a_group_is_dispatched_once_and_finishes_once():
    buffer = buffer_of()
    dispatch(buffer, 0)
    with pytest.raises(ValueError, match="group 0 dispatched twice"):
        buffer.dispatch(0, 0)
    finish(buffer, 0)
    with pytest.raises(ValueError, match="group 0 finished twice"):
        buffer.finish(0)


@pytest.mark.parametrize("version", [0, 2])
def test_a_version_is_published_in_order_and_after_its_batches(version):
    buffer = buffer_of(groups=1)
    dispatch(buffer, 0)
    finish(buffer, 0)
    buffer.take()
    with pytest.raises(ValueError, match=f"version {version} published after 0, with 1 batches trained"):
        buffer.publish(version)


def test_the_last_version_of_a_run_may_be_cut_short():
    buffer = buffer_of(groups=1, batches=4, lag=2)
    dispatch(buffer, 0)
    finish(buffer, 0)
    buffer.take()
    buffer.publish(1)
    assert buffer.batch == 1


def test_a_continued_run_starts_within_a_version():
    buffer = Buffer(Window(2, 3, 1.0, 1), batch=7)
    assert buffer.batch == 7
    assert buffer.counted == 2, "batch 6 trained at version 2, which the replicas have"
    dispatch(buffer, 0, 1, version=2)
    finish(buffer, 0, 1)
    assert buffer.take() == Batch((0, 1))
    with pytest.raises(ValueError, match="version 2 published after 2"):
        buffer.publish(2)
    buffer.publish(3)


def test_pending_lists_groups_in_the_order_of_dispatch():
    buffer = buffer_of(groups=1)
    dispatch(buffer, 2, 0, 1)
    finish(buffer, 0)
    assert buffer.pending == (2, 0, 1)
    buffer.take()
    assert buffer.pending == (2, 1)


def test_a_group_that_leaves_makes_room_and_is_required_no_more():
    buffer = at_its_deadline("Wait")
    finish(buffer, 3)
    room = buffer.room
    buffer.leave(0)
    assert buffer.room == room + 1
    assert buffer.take() == Batch((3,))
    finish(buffer, 4)
    with pytest.raises(ValueError, match="group 4 has finished: it leaves with a batch"):
        buffer.leave(4)


def test_what_is_missing_is_reported_without_taking_a_batch():
    buffer = at_its_deadline("Wait")
    finish(buffer, 3, 4)
    assert buffer.missing() == Blocked(finished=2, needed=1, due=(0,))
    assert buffer.batch == 2


def test_a_masked_group_counts_once_however_long_its_deadline_has_passed():
    buffer = buffer_of(groups=2, lag=1, policy="MaskTokens", threshold=1.0)
    dispatch(buffer, 0, 1, 2)
    finish(buffer, 1, 2)
    for version in range(1, 6):
        buffer.take()
        buffer.publish(version)
        dispatch(buffer, 2 * version + 1, 2 * version + 2, version=version)
        finish(buffer, 2 * version + 1, 2 * version + 2)
    assert buffer.pending[0] == 0
    assert buffer.batch - 1 > buffer.deadline(0)
    assert buffer.excess() == 1


class Plain:
    """The rule as docs/design/staleness.md states it, over all held groups at every question."""

    def __init__(self, window: Window, policy: MissedDeadlinePolicy) -> None:
        self.window, self.policy, self.batch = window, policy, 0
        self.deadlines: dict[int, int] = {}
        self.completed: list[int] = []

    def take(self) -> Batch | None:
        size = self.window.groups_per_batch
        due = {g: max(d, self.batch) for g, d in self.deadlines.items() if g in self.completed or d >= self.batch}
        order = sorted(self.completed, key=lambda g: (self.deadlines[g], self.completed.index(g)))
        chosen: list[int] = []
        for last in sorted(set(due.values())):
            required = min(sum(d <= last for d in due.values()) - (last - self.batch) * size, size)
            within = [group for group in order if due[group] <= last]
            if len(within) < required and self.policy is MissedDeadlinePolicy.WAIT:
                return None
            chosen = within[: max(len(chosen), required)]
        if len(self.completed) < size:
            return None
        chosen += [group for group in self.completed if group not in chosen][: size - len(chosen)]
        self.batch += 1
        for group in chosen:
            del self.deadlines[group]
            self.completed.remove(group)
        missed = [
            g for g, d in self.deadlines.items() if d < self.batch and self.policy is MissedDeadlinePolicy.DISCARD
        ]
        for group in missed:
            del self.deadlines[group]
            self.completed = [other for other in self.completed if other != group]
        return Batch(tuple(chosen), tuple(missed))


@given(data=st.data())
def test_the_cohorts_decide_as_the_plain_rule_does(data):
    window = data.draw(
        st.builds(
            lambda size, batches, lag: Window(size, batches, lag, lag),
            st.integers(1, 3),
            st.integers(1, 2),
            st.integers(0, 3),
        )
    )
    policy = data.draw(st.sampled_from(MissedDeadlinePolicy))
    buffer, plain = Buffer(window, policy), Plain(window, policy)
    for number in range(data.draw(st.integers(0, 40))):
        published = buffer.published
        if buffer.room:
            buffer.dispatch(number, published)
            plain.deadlines[number] = window.deadline(published)
        running = [group for group in plain.deadlines if group not in plain.completed]
        if running and data.draw(st.booleans()):
            born = data.draw(st.sampled_from(running))
            version = published + data.draw(st.integers(0, 1))
            buffer.born(born, version)
            plain.deadlines[born] = window.deadline(version)
        for group in data.draw(st.permutations(running))[: data.draw(st.integers(0, 3))]:
            buffer.finish(group)
            plain.completed.append(group)
        taken, expected = buffer.take(), plain.take()
        if expected is None:
            assert taken is None
        else:
            assert isinstance(taken, Batch)
            assert taken.groups == expected.groups
            assert sorted(taken.discarded) == sorted(expected.discarded)
            if buffer.batch // window.batches_per_version > published:
                buffer.publish(buffer.batch // window.batches_per_version)
