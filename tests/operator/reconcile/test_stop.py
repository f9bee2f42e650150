"""Suspend, resume, deadline, and a changed spec."""

from dataclasses import replace

import pytest

from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from qwen35_trainer.contract import StopOrder
from qwen35_trainer.manifest import Problem
from tests.operator.reconcile.world import SPEC, World


@pytest.fixture
def world() -> World:
    world = World()
    world.until_running()
    return world


def test_suspending_orders_the_trainer_to_save_and_waits(world):
    world.edit(suspend=True)
    world.reconcile()
    assert world.order.reason == "Suspend"
    assert world.status.state == "Suspending"
    assert world.jobs["demo-1"].deleting is None
    assert world.wanted_after == 300


def test_the_job_goes_once_the_trainer_has_saved(world):
    world.edit(suspend=True)
    world.reconcile()
    world.obey()
    world.settle()
    assert world.status.state == "Suspended"
    assert world.is_true("Suspended")
    assert world.is_true("Ready")
    assert not world.jobs
    assert not world.pods
    assert world.status.lastCheckpoint.update == 7
    assert world.status.attempts[-1].outcome == "Suspended"


def test_without_storage_no_message_promises_a_checkpoint():
    world = World(spec={**SPEC, "checkpoint": {"graceSeconds": 300}})
    world.until_running()
    world.edit(suspend=True)
    world.reconcile()
    messages = [world.condition("Ready").message]
    world.report("Stopped", stopAcknowledged=world.order.id)
    world.reconcile()
    messages.append(world.status.attempts[-1].message)
    world.settle()
    assert world.status.state == "Suspended"
    messages += [world.condition("Ready").message, *(event.message for event in world.events)]
    assert not [
        text for text in messages if "save and stop" in text or "saved and" in text or "last checkpoint" in text
    ]
    assert "start from the beginning" in world.condition("Ready").message


def test_no_message_promises_a_checkpoint_to_a_training_suspended_before_its_first_one(world):
    world.edit(suspend=True)
    world.reconcile()
    world.report("Stopped", stopAcknowledged=world.order.id)
    world.settle(3)
    assert world.status.state == "Suspended"
    assert world.condition("Ready").message == "set spec.suspend: false to start; no checkpoint was saved so far"


def test_a_trainer_that_cannot_be_read_still_gets_the_order(world):
    world.unreadable = "progress.json is not a ProgressReport"
    world.edit(suspend=True)
    world.reconcile()
    assert world.order.reason == "Suspend"
    assert world.jobs["demo-1"].deleting is None


def test_a_report_of_an_attempt_that_does_not_exist_does_not_spare_the_trainer_the_order(world):
    world.report(attempt=2, update=9)
    world.edit(suspend=True)
    world.reconcile()
    assert world.order.reason == "Suspend"
    assert world.jobs["demo-1"].deleting is None


def test_a_trainer_that_does_not_answer_gets_its_grace_and_no_more(world):
    world.edit(suspend=True)
    world.reconcile()
    world.wait(299)
    world.reconcile()
    assert world.jobs["demo-1"].deleting is None
    world.wait(1)
    world.settle()
    assert world.status.state == "Suspended"
    assert "graceSeconds 300 are over" in world.status.attempts[-1].message


def test_a_trainer_that_fails_while_stopping_is_still_suspended(world):
    world.edit(suspend=True)
    world.reconcile()
    world.report("Failed", reason="StorageFailed", message="disk full")
    world.settle()
    assert world.status.state == "Suspended"
    assert "disk full" in world.status.attempts[-1].message


def test_a_trainer_whose_report_somebody_has_deleted_still_gets_the_order(world):
    """The operator creates -progress again, empty. The status has the time of the report that was there."""
    world.progress = None
    world.edit(suspend=True)
    world.reconcile()
    assert world.order is not None
    assert world.status.state == "Suspending"
    assert [attempt.outcome for attempt in world.status.attempts] == ["Running"]


def test_an_attempt_that_has_not_begun_is_deleted_immediately():
    world = World()
    world.settle(2)
    world.edit(suspend=True)
    world.settle()
    assert world.status.state == "Suspended"
    assert world.order is None


def test_a_training_created_suspended_starts_nothing():
    world = World()
    world.edit(suspend=True)
    world.settle(3)
    assert world.status.state == "Suspended"
    assert not world.children
    assert not world.jobs


def test_resuming_is_the_next_attempt_and_no_failure(world):
    world.edit(suspend=True)
    world.reconcile()
    world.obey()
    world.settle()
    world.edit(suspend=False)
    world.settle(3)
    assert sorted(world.jobs) == ["demo-2"]
    assert world.status.restarts == 0
    assert world.order is None


def test_an_order_once_given_is_carried_out_even_when_its_reason_is_gone(world):
    world.edit(suspend=True)
    world.reconcile()
    world.edit(suspend=False)
    world.reconcile()
    assert world.status.state == "Suspending"
    world.obey()
    world.settle()
    assert world.status.state == "Starting"
    assert sorted(world.jobs) == ["demo-2"]


def test_an_answer_to_an_earlier_order_is_none_to_this_one(world):
    world.report("Stopped", stopAcknowledged="0-Suspend")
    world.edit(suspend=True)
    world.reconcile()
    assert world.status.attempts[-1].reason == "Interrupted"


def test_the_deadline_counts_all_attempts_and_stops_the_last_one():
    world = World()
    world.edit(activeDeadlineSeconds=600)
    world.until_running()
    world.wait(300)
    world.finish_job(ok=False)
    world.reconcile()
    world.wait(60)
    world.settle()
    world.report(update=2)
    assert 300 <= world.status.activeSeconds <= 310
    world.wait(290)
    world.reconcile()
    assert world.order.reason == "DeadlineExceeded"
    world.obey()
    world.reconcile()
    assert world.status.state == "Failed"
    assert world.condition("Failed").reason == "DeadlineExceeded"
    world.finish_job(ok=True)
    world.settle()
    assert not world.pods


def test_a_suspension_that_waits_for_a_pod_of_a_lost_node_names_pod_and_node(world):
    world.edit(suspend=True)
    world.reconcile()
    (head,) = [pod for pod in world.pods.values() if pod.pool == "head"]
    world.obey()
    world.settle()
    assert world.status.state == "Suspended"
    world.pods[head.name] = replace(head, deleting=world.now)
    world.wait(100)
    world.reconcile()
    assert world.condition("Ready").reason == "Cleaning"
    assert world.condition("Degraded").status == "False"
    assert world.wanted_after == 20, "nothing may happen to the pod that would wake the operator"
    world.wait(world.wanted_after)
    world.reconcile()
    assert (world.status.state, world.condition("Ready").reason) == ("Suspending", "PodsNotEnded")
    assert f"{head.name} on node {head.node}" in world.condition("Degraded").message
    assert world.events[-1].reason == "PodsNotEnded"
    assert world.wanted_after <= 30
    world.pods[head.name] = replace(head, deleting=head.created, ended=True)
    world.reconcile()
    assert world.condition("Ready").reason == "Cleaning", "its end is confirmed; a finalizer may hold the object"
    world.pods.clear()
    world.reconcile()
    assert world.status.state == "Suspended"


def test_a_deadline_that_is_extended_while_the_trainer_saves_ends_the_attempt_but_not_the_training(world):
    world.edit(activeDeadlineSeconds=600)
    world.wait(600)
    world.reconcile()
    assert world.order.reason == "DeadlineExceeded"
    world.edit(activeDeadlineSeconds=6000)
    world.obey()
    world.settle()
    assert world.status.attempts[0].outcome == "Suspended"
    assert (world.status.state, sorted(world.jobs)) == ("Starting", ["demo-2"])


@pytest.mark.parametrize("deadline", [None, 10_000])
def test_an_order_that_the_operator_has_not_written_does_not_fail_the_training(world, deadline):
    """A user with rights on the namespace's ConfigMaps can stop an attempt, as one with rights on its pods can."""
    if deadline is not None:
        world.edit(activeDeadlineSeconds=deadline)
    world.order_to_stop(StopOrder(id="1-DeadlineExceeded", reason="DeadlineExceeded", time=0.0))
    world.reconcile()
    assert world.status.attempts[0].outcome == "Suspended"
    world.settle()
    assert (world.status.state, sorted(world.jobs)) == ("Starting", ["demo-2"])
    assert world.order is None


TAMPERING = {
    "removed": lambda order: None,
    "begun again": lambda order: order.model_copy(update={"time": order.time + 200}),
}


@pytest.mark.parametrize("change", TAMPERING.values(), ids=TAMPERING)
def test_an_order_that_somebody_removes_or_changes_again_and_again_still_ends_the_attempt_after_its_grace(
    world, change
):
    """Everybody who may change the namespace's ConfigMaps can, and a trainer that ignores the order would run forever."""
    world.edit(suspend=True)
    world.reconcile()
    began = world.now
    while world.status.attempts[0].outcome == "Running":
        world.order_to_stop(change(world.order or StopOrder(id="1-Suspend", reason="Suspend", time=0.0)))
        world.wait(20)
        world.reconcile()
        assert (world.now - began).total_seconds() <= 320
    assert "graceSeconds 300 are over" in world.status.attempts[0].message
    world.settle()
    assert (world.status.state, sorted(world.jobs)) == ("Suspended", [])


def test_an_order_that_is_removed_is_given_again_with_its_time(world):
    world.edit(suspend=True)
    world.reconcile()
    order = world.order
    world.wait(100)
    world.order_to_stop(None)
    world.wait(20)
    world.reconcile()
    assert world.order == order
    world.obey()
    world.settle()
    assert "saved and stopped as asked" in world.status.attempts[0].message


def test_an_order_is_in_the_status_until_the_attempt_has_ended(world):
    world.edit(suspend=True)
    world.reconcile()
    assert world.status.attempts[0].stop.reason == "Suspend"
    world.obey()
    world.settle()
    assert world.status.attempts[0].stop is None


@pytest.mark.parametrize("obeys", [True, False])
def test_an_order_from_the_future_counts_from_now(world, obeys):
    """The trainer obeys it, and without an answer its grace period would never end."""
    world.order_to_stop(StopOrder(id="1-Suspend", reason="Suspend", time=1e300))
    world.reconcile()
    assert world.status.state == "Suspending"
    assert world.order.time == world.now.timestamp()
    if obeys:
        world.obey()
    else:
        world.wait(world.wanted_after)
    world.settle()
    assert (world.status.attempts[0].outcome, world.status.restarts) == ("Suspended", 0)
    assert (world.status.state, sorted(world.jobs)) == ("Starting", ["demo-2"])


def test_time_spent_suspended_does_not_count(world):
    world.edit(suspend=True, activeDeadlineSeconds=600)
    world.reconcile()
    world.obey()
    world.settle()
    world.wait(3600)
    world.edit(suspend=False)
    world.settle(3)
    assert world.status.state == "Starting"


def test_what_a_running_attempt_cannot_take_over_restarts_it_from_a_checkpoint(world):
    world.edit(train={"optimizer": {"learningRate": 2e-6}})
    world.reconcile()
    assert world.order.reason == "SpecChanged"
    world.obey()
    world.settle()
    assert sorted(world.jobs) == ["demo-2"]
    assert world.status.restarts == 0


def test_live_fields_reach_the_trainer_without_a_restart(world):
    world.edit(checkpoint={"everyUpdates": 5}, evaluation={"everyUpdates": 50})
    world.reconcile()
    live = world.observe().control.live
    assert (live.checkpointEveryUpdates, live.evaluationEveryUpdates) == (5, 50)
    assert world.order is None
    assert world.status.state == "Running"


@pytest.fixture
def going() -> World:
    """A training that trains, and that is being deleted by a user who wants a last checkpoint."""
    world = World(finalizers=("example.com/other", LAST_CHECKPOINT))
    world.until_running()
    world.delete()
    world.reconcile()
    return world


def test_a_training_saves_before_it_is_deleted_if_its_user_wants_that(going):
    assert going.order.reason == "Deleted"
    assert (going.status.state, going.finalizers) == ("Suspending", ("example.com/other", LAST_CHECKPOINT))
    going.obey()
    going.reconcile()
    assert going.status.attempts[-1].reason == "Deleted"
    assert going.status.lastCheckpoint.update == 7
    going.reconcile()
    assert going.finalizers == ("example.com/other",)
    writes = going.writes
    going.reconcile()
    assert going.writes == writes


@pytest.mark.parametrize("job", ["is there still", "was deleted first"])
def test_a_foreground_deletion_is_reported_because_it_leaves_no_time_to_save(job):
    """As by Argo CD: Kubernetes deletes the children of such a training before the training."""
    world = World(finalizers=("foregroundDeletion", LAST_CHECKPOINT))
    world.until_running()
    world.delete()
    if job == "was deleted first":
        world.jobs.clear(), world.clusters.clear(), world.pods.clear()
    world.reconcile()
    (event,) = {event for event in world.events if event.reason == "NoLastCheckpoint"}
    assert (event.type, "PrunePropagationPolicy=background" in event.message) == ("Warning", True)


def test_other_deletions_are_not_reported_as_too_fast(going):
    assert not any(event.reason == "NoLastCheckpoint" for event in going.events)


def test_a_deletion_waits_no_longer_than_the_grace_period(going):
    assert going.wanted_after == 300
    going.wait(300)
    going.settle(2)
    assert LAST_CHECKPOINT not in going.finalizers


@pytest.mark.parametrize("how", ["fails", "deletes its job", "breaks the spec"])
def test_a_deletion_does_not_wait_for_what_cannot_come(going, how):
    match how:
        case "fails":
            going.report("Failed", reason="StorageFailed", message="the disk is full")
        case "deletes its job":
            going.jobs.clear(), going.clusters.clear(), going.pods.clear()
        case "breaks the spec":
            going.edit(rollout={"nodes": "many"})
    going.settle(2)
    assert LAST_CHECKPOINT not in going.finalizers
    assert len(going.status.attempts) == 1


def test_a_deletion_waits_while_the_operator_cannot_see(going):
    going.unavailable = (Problem("rayjobs.ray.io", "no such kind.", "Install KubeRay."),)
    going.wait(600)
    going.settle(2)
    assert LAST_CHECKPOINT in going.finalizers
    assert going.condition("Ready").reason == "Unavailable"
    going.unavailable = ()
    going.settle(2)
    assert LAST_CHECKPOINT not in going.finalizers


@pytest.mark.parametrize("when", ["before it starts", "before the trainer reports", "suspended", "after the end"])
def test_a_deletion_waits_for_nothing_if_there_is_nothing_to_save(when):
    world = World(finalizers=(LAST_CHECKPOINT,))
    if when == "before the trainer reports":
        world.settle(2)
    elif when != "before it starts":
        world.until_running()
        if when == "suspended":
            world.edit(suspend=True)
            world.reconcile()
            world.obey()
        else:
            world.report("Succeeded")
        world.settle(4)
    world.delete()
    world.reconcile(), world.reconcile()
    assert world.finalizers == ()


def test_without_the_finalizer_a_deletion_does_not_wait_for_the_operator():
    world = World()
    world.until_running()
    world.delete()
    writes = world.writes
    world.reconcile()
    assert (world.order, world.writes) == (None, writes)
