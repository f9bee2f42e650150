"""The actions of the coordinator, event by event."""

import pytest

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.pipeline.coordinator import NothingToTrain
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.pipeline.requests import StopTraining, TakeCheckpoint
from qwen35_trainer.pipeline.window import Window
from tests.pipeline.world import World


def settings(
    *, groups: int = 2, batches_per_version: int = 1, threshold: float = 1.0, lag: int = 2, **more
) -> CoordinatorSettings:
    window = Window(groups, batches_per_version, threshold, lag)
    return CoordinatorSettings(**({"window": window, "group_size": 2, "batches": 9} | more))


def world(*slots: int, start: SchedulingSnapshot = SchedulingSnapshot(), **more) -> World:  # noqa: B008, frozen
    built = World(settings(**more), start)
    for each in slots:
        built.join(each)
    return built


def actions_of(played: World, kind: type) -> list:
    return [action for action in played.log if isinstance(action, kind)]


def finish_group(played: World, group: int, *, signal: bool = True) -> None:
    for name in [name for name in played.running if name[0] == group]:
        played.finish(name)
    played.score(group, signal=signal)


# Dispatch and slots.


def test_groups_are_dispatched_as_slots_are_free_and_not_before():
    played = world(3)
    assert [action.group for action in actions_of(played, notices.GroupDispatched)] == [0, 1]
    assert played.running == [(0, 0), (0, 1), (1, 0)]
    played.finish((0, 0))
    assert played.running == [(0, 1), (1, 0), (1, 1)], "what waits comes before a new prompt"
    assert len(played.positions) == 2


def test_the_window_bounds_what_is_dispatched_however_many_slots_there_are():
    played = world(100)
    assert len(played.held) == 4
    assert played.coordinator.why_no_dispatch == "the window is full: 4 of 4 groups"


def test_sequences_go_to_the_replica_with_the_smallest_share_of_its_slots_taken():
    played = world(2, 6)
    assert [len(replica.running) for replica in played.replicas.values()] == [2, 6]
    apart = world(1, 8, groups=1)
    assert [len(replica.running) for replica in apart.replicas.values()] == [1, 3]


def test_the_end_of_the_run_dispatches_no_more_than_its_batches_take():
    played = world(100, batches=1)
    assert len(played.held) == 2
    assert played.coordinator.why_no_dispatch == "the remaining batches have all their groups"


def test_a_replica_that_leaves_gets_nothing_and_finishes_what_it_has():
    played = world(2, 2)
    played.leave(0, True)
    before = dict(played.replicas[0].running)
    played.finish((0, 0))
    played.finish((0, 1))
    assert before.keys() - played.replicas[0].running.keys() <= {(0, 0), (0, 1)}
    assert not played.replicas[0].running.keys() - before.keys()
    played.leave(0, False)
    assert len(played.replicas[0].running) == 2


def with_a_replica_behind() -> tuple[World, int]:
    """The only replica was lost and a version was published without it. Its replacement joined with the version before."""
    played = world(4)
    for name in played.running:
        played.finish(name)
    for group in list(played.unscored):
        played.score(group)
    played.lose(0, keep=0)
    played.train()
    assert played.coordinator.version == 1
    return played, played.join(4, behind=1)


def test_a_replica_with_older_weights_than_the_published_gets_nothing_before_it_has_loaded_those():
    played, behind = with_a_replica_behind()
    assert not played.running
    played.leave(behind, True)
    played.load(behind)
    assert not played.running
    played.leave(behind, False)
    assert len(played.running) == 4
    played.play()


def until_version_2_travels(played: World) -> None:
    while played.travelling is None:
        for name in played.running:
            played.finish(name)
        for group in list(played.unscored):
            played.score(group)
        if played.training is not None:
            played.train()


def test_a_version_in_transfer_does_not_wait_for_a_replica_that_is_behind():
    played, behind = with_a_replica_behind()
    quick = played.join(8)
    until_version_2_travels(played)
    assert played.travelling == 2
    played.load(quick)
    assert played.coordinator.version == 2
    assert played.replicas[behind].is_behind
    played.load(behind)
    played.play()


def test_a_version_in_transfer_does_not_count_a_lost_replica_that_was_behind():
    played, behind = with_a_replica_behind()
    quick = played.join(8)
    until_version_2_travels(played)
    played.lose(behind, keep=0)
    assert played.coordinator.version == 1
    played.load(quick)
    assert played.coordinator.version == 2
    played.play()


def test_a_replica_that_has_caught_up_is_waited_for_as_any_other():
    played, behind = with_a_replica_behind()
    quick = played.join(8)
    until_version_2_travels(played)
    played.load(behind, next_only=True)
    assert not played.replicas[behind].is_behind
    played.load(quick)
    assert played.coordinator.version == 1
    played.load(behind)
    assert played.coordinator.version == 2
    played.play()


def test_a_replica_that_is_there_may_not_join_again():
    played = world(4)
    with pytest.raises(ValueError, match="replica 0 joins twice"):
        played.send(on.ReplicaJoined(0, 1, 0))


# Lost replicas.


def test_the_sequences_of_a_lost_replica_continue_first_and_keep_their_tokens():
    played = world(4)
    played.generate(0, 5)
    played.lose(0, keep=3)
    played.join(3)
    (started,) = [action for action in actions_of(played, do.StartSequences) if action.replica == 1]
    assert started.sequences == (((0, 0), 3), ((0, 1), 3), ((1, 0), 3))


def test_the_replicas_of_a_node_that_are_lost_together_do_not_take_over_from_each_other():
    played = world(8, 32, 16, groups=4)  # replica 1 has room for sequences of replica 0
    for number in played.replicas:
        played.generate(number, 5)
        played.tell(number)
    started_before = len(actions_of(played, do.StartSequences))
    with played.together():
        played.lose(0, keep=5)
        played.lose(1, keep=5)
    later = actions_of(played, do.StartSequences)[started_before:]
    assert {action.replica for action in later} == {2}
    assert [keep for action in later for _, keep in action.sequences] == [5] * 16


def test_tokens_given_to_a_replica_that_is_lost_before_it_reports_are_kept():
    """The loss of replica 0 moves its sequences to replica 1, whose loss comes next. It was asked what it has before that."""
    played = world(4, 4, 8, groups=4)
    for number in played.replicas:
        played.generate(number, 5)
        played.tell(number)
    moved = set(played.replicas[0].running)
    played.leave(2, True)
    played.finish(next(name for name in played.running if name in played.replicas[1].running))
    played.lose(0, keep=5)
    moved &= played.replicas[1].running.keys()
    assert moved
    played.leave(2, False)
    started_before = len(actions_of(played, do.StartSequences))
    played.lose(1, keep=None)
    for name in list(played.replicas[2].running)[:6]:  # which makes room
        played.finish(name)
    later = actions_of(played, do.StartSequences)[started_before:]
    kept = {name: keep for action in later for name, keep in action.sequences}
    assert {kept[name] for name in moved} == {5}


def test_reports_of_a_lost_replica_are_ignored():
    played = world(2, 2)
    played.lose(0, keep=0)
    before = len(played.log)
    played.send(on.VersionLoaded(0, 1), on.ReplicaLeaving(0), on.ReplicaLost(0))
    assert len(played.log) == before


def test_what_a_lost_replica_reports_late_is_not_kept_elsewhere():
    played = world(1, 1, groups=1, group_size=1)
    played.generate(0, 5)
    played.leave(1, True)
    name = next(iter(played.replicas[0].running))
    played.lose(0, keep=2)
    played.send(on.SequencesProgressed({name: 5}))
    played.join(1)
    assert actions_of(played, do.StartSequences)[-1].sequences == ((name, 2),)


def test_without_partial_rollout_they_start_over():
    played = world(4, partial_rollout=False)
    played.generate(0, 5)
    played.lose(0, keep=3)
    played.join(4)
    assert {keep for action in actions_of(played, do.StartSequences)[-1:] for _, keep in action.sequences} == {0}


def test_a_group_that_starts_over_after_a_publication_is_young_again():
    """All of its tokens are of the new version, so its deadline is that of a new group."""
    played = world(1, 3, groups=1, group_size=1, lag=1, threshold=1.0)
    finish_group(played, 1)
    played.train()
    played.load(1)
    assert played.coordinator.buffer.deadline(0) == 1
    played.lose(0, keep=0)
    assert played.coordinator.version == 1
    assert played.coordinator.buffer.deadline(0) == 2


def test_a_sequence_that_continues_with_older_weights_is_as_old_as_they_are():
    """Version 1 is in transfer: the replica that has it is lost, and one that still has version 0 continues with the tokens."""
    played = world(1, 1, groups=1, group_size=1, lag=1, threshold=1.0)
    finish_group(played, 0)
    played.train()
    played.load(1)
    played.generate(1, 3)
    played.tell(1)
    assert played.coordinator.buffer.deadline(1) == 2, "born at version 1"
    played.lose(1, keep=3)
    assert played.replicas[0].running == {(1, 0): [1, 1, 1]}
    assert played.coordinator.buffer.deadline(1) == 1


# Missed deadlines.


def straggling(policy: MissedDeadlinePolicy) -> World:
    """Batch 2 is next, group 0 of version 0 runs still and must be in it; another group has finished."""
    played = world(8, groups=1, group_size=1, lag=2, threshold=2.0, on_missed_deadline=policy)
    for group in (1, 2):
        finish_group(played, group)
        played.train()
        played.load(0)
    finish_group(played, 3)
    return played


def test_wait_waits_for_the_group_that_is_due():
    played = straggling(MissedDeadlinePolicy.WAIT)
    assert played.training is None
    assert played.coordinator.buffer.missing().due == (0,)
    finish_group(played, 0)
    assert played.training.groups == (0,)


def test_mask_tokens_trains_another_group_meanwhile():
    played = straggling(MissedDeadlinePolicy.MASK_TOKENS)
    assert played.training.groups == (3,)


def test_discard_drops_the_group_and_dispatches_its_prompt_again():
    played = straggling(MissedDeadlinePolicy.DISCARD)
    assert played.training.groups == (3,)
    assert actions_of(played, do.CancelSequences) == [do.CancelSequences(0, ((0, 0),))]
    assert actions_of(played, notices.GroupLeft) == [notices.GroupLeft(0, 0, LeaveReason.DISCARDED)]
    assert played.log[-2] == notices.GroupDispatched(5, 0)


# The lane.


def test_a_straggler_moves_to_the_lane_and_its_slot_is_taken_again():
    played = world(4, lane_after=5, lane_breaks_even=False)
    played.join(1, lane=True)
    played.generate(0, 5)
    played.tell(0)
    assert actions_of(played, do.MoveSequences) == [do.MoveSequences(0, 1, ((0, 0),))]
    assert len(played.replicas[0].running) == 4
    assert played.replicas[1].running == {(0, 0): [0] * 5}


def test_a_straggler_that_its_source_refused_after_it_was_moved_stays_in_the_lane_and_the_source_is_doubted():
    """The refusal and the decision cross: the replica had refused the sequence when the coordinator moved it."""
    played = world(4, 4, lane_after=5, lane_breaks_even=False)
    played.join(2, lane=True)
    played.generate(0, 5)
    played.tell(0)
    (move,) = actions_of(played, do.MoveSequences)
    moved = move.sequences[0]
    before = len(played.log)
    played.send(on.SequenceRefused(moved, move.source, 5))
    assert played.log[before:] == [], "it is sent nowhere else"
    states = played.coordinator._placement
    assert [states.pool[0].doubted, states.pool[1].doubted, states.lane[2].doubted] == [True, False, False]
    played.trust(0)
    assert not states.pool[0].doubted


def test_of_those_that_wait_for_the_lane_the_earliest_deadline_goes_first():
    played = world(2, groups=1, group_size=1, lag=2, threshold=2.0, lane_after=5, lane_breaks_even=False)
    lane = played.join(1, lane=True)
    finish_group(played, 0)
    played.train()
    for number in (0, lane):
        played.load(number)
    young = max(played.running)  # dispatched at version 1, the other at version 0
    played.generate(0, 5)
    played.leave(lane, True)
    played.tell(0)
    played.leave(lane, False)
    (move,) = actions_of(played, do.MoveSequences)
    assert move.sequences == (min(played.running),)
    assert move.sequences != (young,)


def test_a_straggler_of_a_lost_lane_continues_in_the_pool_and_returns_to_the_next_lane():
    played = world(4, lane_after=5, lane_breaks_even=False)
    played.join(1, lane=True)
    played.generate(0, 5)
    played.tell(0)
    played.lose(1, keep=5)
    assert (0, 0) not in played.running, "the pool is full"
    played.finish((0, 1))
    assert played.replicas[0].running[0, 0] == [0] * 5
    played.join(1, lane=True)
    assert actions_of(played, do.MoveSequences)[-1] == do.MoveSequences(0, 2, ((0, 0),))


def test_a_straggler_whose_lane_is_lost_before_it_arrives_continues_from_what_it_had_reported():
    """As when the lane is lost while the journal is flushed: it does not know the straggler yet."""
    played = world(4, lane_after=5, lane_breaks_even=False)
    lane = played.join(1, lane=True)
    played.generate(0, 5)
    played.tell(0)
    played.lose(lane, keep=None)
    played.finish((0, 1))
    assert actions_of(played, do.StartSequences)[-1].sequences[0] == ((0, 0), 5)


def test_stragglers_that_end_while_the_lane_is_full_are_forgotten():
    masks = MissedDeadlinePolicy.MASK_TOKENS
    played = world(8, groups=4, group_size=1, lane_after=1, batches=100, on_missed_deadline=masks)
    played.join(1, lane=True)
    for _ in range(60):
        played.generate(0, 2)
        played.tell(0)
        for name in list(played.replicas[0].running):
            played.finish(name)
        for group in list(played.unscored):
            played.score(group)
        if played.training is not None:
            played.train()
        played.load(0)
        played.load(1)
    assert len(played.trained) > 150
    assert len(played.coordinator._placement._stragglers) < 100


def test_the_lane_takes_everything_when_the_pool_has_no_replica_left():
    played = world(2, lane_after=5, lane_breaks_even=False)
    played.join(2, lane=True)
    played.lose(0, keep=0)
    assert len(played.replicas[1].running) == 2


# Weights.


def test_a_transfer_overlaps_the_next_batch_and_the_window_opens_when_all_have_the_version():
    played = world(4, 4, groups=1, group_size=1)
    finish_group(played, 0)
    played.train()
    assert (played.travelling, played.copied) == (1, None)
    finish_group(played, 1)
    assert played.training.batch == 1
    played.load(0)
    assert played.coordinator.version == 0
    assert len(played.held) == 0
    played.load(1)
    assert actions_of(played, notices.VersionPublished) == [notices.VersionPublished(1)]
    assert len(played.held) == 1, "the batch that trains counts still"


def test_a_version_is_published_and_the_next_batch_trains_when_its_weights_are_copied():
    played = world(4, groups=1, group_size=1)
    finish_group(played, 0)
    finish_group(played, 1)
    played.train(copies=False)
    assert (played.copying, played.travelling, played.training) == (1, None, None)
    played.copy()
    assert played.travelling == 1
    assert played.training.batch == 1


def test_a_copy_that_was_not_requested_is_refused():
    with pytest.raises(ValueError, match="version 3 copied, which was not requested"):
        world(8).send(on.WeightsCopied(3))


def test_a_version_without_any_replica_is_published_after_its_copy_and_an_older_replica_may_join():
    """All replicas are lost while a batch trains. The replacement joins with the version before, at any moment."""
    played = world(1, groups=1, group_size=1)
    finish_group(played, 0)
    played.lose(0, keep=0)
    played.train(copies=False)
    assert played.coordinator.version == 0, "nobody could load the version: it is not copied"
    early = played.join(1)
    assert not played.replicas[early].is_behind
    played.lose(early, keep=0)
    played.copy()
    assert played.coordinator.version == 1
    late = played.join(1, behind=1)
    assert not played.replicas[late].running
    played.load(late)
    assert played.replicas[late].running


def test_weights_are_copied_once_ahead_and_the_batch_after_that_waits():
    played = world(8, groups=1, group_size=1, threshold=3.0, lag=3)
    for group in range(3):
        finish_group(played, group)
    for _ in range(2):
        played.train()
    assert (played.travelling, played.copied) == (1, 2)
    played.train()
    finish_group(played, 3)
    assert played.training is None, "version 3 has no place yet, and its weights must not change"
    played.load(0)
    assert (played.travelling, played.copying) == (2, 3)
    assert played.training is None
    played.copy()
    assert played.training.batch == 3


def test_without_partial_rollout_a_publication_waits_until_nothing_runs_and_nothing_starts_meanwhile():
    played = world(4, groups=1, partial_rollout=False)
    finish_group(played, 0)
    played.train()
    assert (played.copied, played.travelling) == (1, None)
    played.finish((1, 0))
    assert played.travelling is None
    played.finish((1, 1))
    assert played.travelling == 1
    assert played.running == []
    played.load(0)
    assert played.running


def test_a_lost_replica_does_not_hold_up_a_publication():
    played = world(4, 4, groups=1, group_size=1)
    finish_group(played, 0)
    played.train()
    played.load(0)
    played.lose(1, keep=0)
    assert played.coordinator.version == 1


def test_an_evaluation_begins_with_its_version_and_the_next_publication_waits_for_it():
    played = world(8, groups=1, group_size=1)
    played.evaluate(version=1, groups=2, samples=1)
    finish_group(played, 0)
    played.train()
    assert all(name[0] < 100 for name in played.running)
    played.load(0)
    evaluation_names = [name for name in played.running if name[0] >= 100]
    assert len(evaluation_names) == 2
    finish_group(played, 1)
    played.train()
    assert (played.copied, played.travelling) == (2, None)
    for name in evaluation_names:
        played.finish(name)
    assert actions_of(played, notices.VersionEvaluated) == [notices.VersionEvaluated(1)]
    assert played.travelling == 2


def test_evaluations_requested_while_a_version_travels_all_take_place():
    """A second request does not replace the first. Each evaluation is of its own version."""
    played = world(8, groups=1, group_size=1, threshold=2.0, lag=3)
    finish_group(played, 0)
    first = played.evaluate(version=1, groups=1, samples=1)
    played.train()
    finish_group(played, 1)
    second = played.evaluate(version=2, groups=1, samples=1)
    played.train()
    played.load(0)
    assert (first.is_running, second.is_running) == (True, False)
    played.finish((1 << 40, 0))
    played.load(0)
    assert second.is_running
    played.finish(((1 << 40) + 100, 0))
    assert actions_of(played, notices.VersionEvaluated) == [notices.VersionEvaluated(1), notices.VersionEvaluated(2)]


@pytest.mark.parametrize("arrived", [False, True])
def test_an_evaluation_of_weights_that_replicas_no_longer_have_is_skipped(arrived):
    played = world(8, groups=1, group_size=1)
    finish_group(played, 0)
    played.train()
    if arrived:
        played.load(0)
    late = played.evaluate(version=0)
    assert late.outcome == "skipped"
    assert actions_of(played, notices.EvaluationSkipped) == [notices.EvaluationSkipped(0)]


def test_an_evaluation_of_a_version_that_never_comes_is_skipped_at_the_end():
    played = world(8, groups=1, group_size=1, batches=1)
    evaluation = played.evaluate(version=7)
    played.play()
    assert evaluation.outcome == "skipped"


def test_an_evaluation_without_prompts_is_complete_immediately():
    played = world(8)
    assert played.evaluate(version=0, groups=0).outcome == "evaluated"


def test_pools_that_take_turns_train_when_nothing_runs_and_generate_when_nothing_trains():
    played = world(8, groups=1, batches_per_version=2, threshold=0.0, lag=0, partial_rollout=False, taking_turns=True)
    finish_group(played, 0)
    assert played.training is None, "the second group of the version still runs"
    finish_group(played, 1)
    assert played.training.batch == 0
    played.train()
    assert played.training.batch == 1
    assert played.running == []
    played.train()
    played.load(0)
    assert len(played.held) == 2


def test_pools_that_take_turns_save_no_checkpoint_while_sequences_run():
    """To save one, the train pool would need the devices."""
    played = world(8, groups=1, threshold=0.0, lag=0, partial_rollout=False, taking_turns=True)
    played.send(TakeCheckpoint())
    assert actions_of(played, do.SaveCheckpoint) == []
    finish_group(played, 0)
    assert len(actions_of(played, do.SaveCheckpoint)) == 1


@pytest.mark.parametrize("groups", [1, 2])
def test_pools_that_take_turns_save_no_checkpoint_when_a_filtered_group_is_replaced(groups):
    """To save one, the replicas would sleep, and drop the sequences that have just started."""
    rules = {"threshold": 0.0, "lag": 0, "partial_rollout": False, "taking_turns": True, "dynamic_sampling": True}
    played = world(8, groups=groups, **rules)
    played.send(TakeCheckpoint())
    for group in range(groups):
        finish_group(played, group, signal=group < groups - 1)
    assert played.running == [(groups, 0), (groups, 1)], "in its place"
    assert actions_of(played, do.SaveCheckpoint) == []
    finish_group(played, groups)
    assert len(actions_of(played, do.SaveCheckpoint)) == 1


# What leaves untrained.


def test_a_group_without_signal_is_filtered_and_replaced():
    played = world(8, dynamic_sampling=True)
    for name in [(0, 0), (0, 1)]:
        played.finish(name)
    played.score(0, signal=False)
    assert actions_of(played, notices.GroupLeft) == [notices.GroupLeft(0, 0, LeaveReason.FILTERED)]
    assert actions_of(played, notices.GroupDispatched)[-1] == notices.GroupDispatched(4, 4)


def test_without_dynamic_sampling_a_group_without_signal_trains():
    played = world(8, groups=1)
    for name in [(0, 0), (0, 1)]:
        played.finish(name)
    played.score(0, signal=False)
    assert played.training.groups == (0,)


def test_a_failed_group_leaves_its_slots_and_is_replaced():
    played = world(2)
    played.send(on.GroupFailed(0))
    assert actions_of(played, do.CancelSequences) == [do.CancelSequences(0, ((0, 0), (0, 1)))]
    assert actions_of(played, notices.GroupLeft) == [notices.GroupLeft(0, 0, LeaveReason.FAILED)]
    assert played.running == [(1, 0), (1, 1)]


def test_a_filter_that_leaves_nothing_ends_the_run_with_the_count():
    played = world(8, groups=1, dynamic_sampling=True)
    for group in range(99):
        finish_group(played, group, signal=False)
    for name in [name for name in played.running if name[0] == 99]:
        played.finish(name)
    with pytest.raises(NothingToTrain, match=r"100 groups in a row left untrained; .*algorithm.dynamicSampling"):
        played.score(99, signal=False)


def test_a_run_in_which_every_group_fails_ends_and_names_the_last_cause():
    played = world(8, groups=1)
    for group in range(99):
        played.send(on.GroupFailed(group, "prompt a: too long"))
    with pytest.raises(
        NothingToTrain, match=r"100 groups in a row left untrained; the last one failed: prompt b: too long"
    ):
        played.send(on.GroupFailed(99, "prompt b: too long"))
    assert [notice.position for notice in actions_of(played, notices.GroupLeft)] == list(range(99)), "each prompt once"


# Checkpoints and the end.


def test_a_checkpoint_is_of_the_state_between_two_batches_and_the_next_one_trains_meanwhile():
    played = world(8, groups=1, group_size=1)
    finish_group(played, 0)
    finish_group(played, 1)
    played.send(TakeCheckpoint())
    assert played.saving is None, "batch 0 trains"
    played.train()
    assert played.saving == do.SaveCheckpoint(SchedulingSnapshot(batch=1, position=2, pending=(1,), group=2))
    assert played.training.batch == 1
    played.save()
    assert [snapshot.batch for snapshot in played.saved] == [1]


def test_a_checkpoint_requested_during_another_waits_for_it_and_has_what_trained_since():
    played = world(8, groups=1, group_size=1)
    for group in range(2):
        finish_group(played, group)
    played.send(TakeCheckpoint())
    played.train()
    played.send(TakeCheckpoint())
    played.train()
    assert played.saving.snapshot.batch == 1
    played.save()
    assert played.saving.snapshot.batch == 2


def test_a_checkpoint_requested_while_the_present_state_is_saved_is_that_one():
    played = world(8, groups=1, group_size=1)
    played.send(TakeCheckpoint())
    played.send(TakeCheckpoint())
    played.save()
    assert played.saving is None


def test_a_stop_waits_for_the_save_in_progress_and_saves_what_trained_meanwhile():
    played = world(8, groups=1, group_size=1)
    finish_group(played, 0)
    finish_group(played, 1)
    played.send(TakeCheckpoint())
    played.train()
    played.send(StopTraining())
    played.train()
    assert not played.ended, "batch 1 has trained and is not saved"
    played.save()
    assert played.saving.snapshot.batch == 2
    assert not played.ended
    played.save()
    assert played.ended


def test_a_checkpoint_that_was_not_requested_is_refused():
    with pytest.raises(ValueError, match="before batch 3 is complete, which was not requested"):
        world(8, groups=1).send(on.CheckpointCompleted(3))


def test_a_stop_saves_what_has_trained_and_ends():
    played = world(8, groups=1, group_size=1)
    finish_group(played, 0)
    played.send(StopTraining())
    played.train()
    assert played.saving is not None
    played.save()
    assert played.ended
    assert played.coordinator.why_no_dispatch == "the run is stopping"


def behind_an_evaluation() -> World:
    """The evaluation of version 1 runs, version 2 waits for it, and version 3 for a place: no batch may train."""
    played = world(16, groups=1, group_size=1, threshold=3.0, lag=4, batches=50)
    played.evaluate(version=1, groups=1, samples=1)
    finish_group(played, 0)
    played.train()
    played.load(0)
    for group in (1, 2, 3):
        finish_group(played, group)
    played.train()
    played.train()
    assert (played.copied, played.training) == (2, None)
    return played


def test_a_stop_saves_and_ends_although_an_evaluation_runs():
    played = behind_an_evaluation()
    played.send(StopTraining())
    assert played.saving.snapshot.batch == 3
    assert actions_of(played, do.CancelSequences)[-1] == do.CancelSequences(0, ((1 << 40, 0),))
    played.save()
    assert played.ended
    assert played.evaluations[0].outcome == "skipped"


def test_a_checkpoint_does_not_wait_for_the_evaluation_either():
    played = behind_an_evaluation()
    played.send(TakeCheckpoint())
    assert played.saving.snapshot.batch == 3


def test_a_stop_copies_nothing_more_and_waits_for_no_copy():
    played = world(8, groups=1, group_size=1)
    finish_group(played, 0)
    finish_group(played, 1)
    played.train(copies=False)
    played.send(StopTraining())
    assert (played.copying, played.saving.snapshot.batch) == (1, 1)
    played.save()
    assert played.ended
    other = world(8, groups=1, group_size=1)
    finish_group(other, 0)
    other.stop()
    assert other.ended
    assert not actions_of(other, do.CopyWeights)


def test_an_evaluation_requested_after_a_stop_is_skipped():
    played = world(8, groups=1, group_size=1)
    finish_group(played, 0)
    played.send(StopTraining())
    assert played.evaluate(version=1).outcome == "skipped"
    played.train()
    played.save()
    assert played.ended


def test_what_has_trained_last_is_saved_while_its_version_travels():
    played = world(8, groups=1, group_size=1, batches=1)
    finish_group(played, 0)
    played.train()
    assert (played.travelling, played.saving.snapshot.batch) == (1, 1)
    played.save()
    assert not played.ended
    played.load(0)
    assert played.ended


def test_a_run_that_continues_dispatches_first_what_was_under_way():
    played = world(8, groups=1, group_size=1, start=SchedulingSnapshot(4, 10, (7, 3), group=20))
    assert actions_of(played, notices.GroupDispatched) == [
        notices.GroupDispatched(20, 7),
        notices.GroupDispatched(21, 3),
    ]
    finish_group(played, 20)
    assert played.training == do.TrainGroups(4, 4, (20,))


def test_a_whole_run_trains_every_prompt_once_publishes_every_version_and_saves_at_the_end():
    played = world(3, 2, batches_per_version=2)
    played.play()
    assert played.trained == sorted(played.trained, key=played.trained.index)
    assert sorted(played.trained) == list(range(18))
    assert [action.version for action in actions_of(played, notices.VersionPublished)] == [1, 2, 3, 4, 5]
    assert [snapshot.batch for snapshot in played.saved] == [9]


@pytest.mark.parametrize(
    ("wrong", "inequality"),
    [
        ({"group_size": 0}, "groupSize 0 < 1"),
        ({"group_size": 1, "dynamic_sampling": True}, "groupSize 1 < 2 with dynamicSampling"),
        ({"lane_after": 0}, "lane.afterTokens 0 < 1"),
        ({"batches": -1}, "batches -1 < 0"),
    ],
)
def test_settings_that_could_never_end_are_refused_with_the_inequality(wrong, inequality):
    with pytest.raises(ValueError, match=inequality):
        settings(**wrong)


@pytest.mark.parametrize(
    ("window", "inequality"),
    [
        ((0, 1, 0.0, 0), "0 groups in a batch < 1"),
        ((1, 0, 0.0, 0), "0 batches in a version < 1"),
        ((4, 1, 2.0, 1), "stalenessThreshold 2.0 must lie between 0 and maxVersionLag 1"),
    ],
)
def test_windows_that_could_never_move_are_refused_with_the_inequality(window, inequality):
    with pytest.raises(ValueError, match=inequality):
        Window(*window)


def test_all_problems_of_settings_are_listed_together():
    with pytest.raises(ValueError, match=r"groupSize 0 < 1.*batches -2 < 0.*afterTokens 0 < 1"):
        settings(group_size=0, batches=-2, lane_after=0)
