"""What is left behind, and for how long."""

import pytest

from tests.operator.reconcile.world import World


def finished() -> World:
    world = World()
    world.edit(cleanupSecondsAfterFinished=100)
    world.until_running()
    world.report("Succeeded")
    world.reconcile()
    world.finish_job(ok=True)
    world.settle(3)
    return world


def test_children_go_after_their_time_and_the_training_stays_succeeded():
    world = finished()
    assert world.children
    world.wait(100)
    world.settle(3)
    assert not world.children
    assert not world.jobs
    assert world.status.state == "Succeeded"


def test_without_a_time_they_stay():
    world = finished()
    world.edit(cleanupSecondsAfterFinished=None)
    world.wait(10_000)
    world.settle(3)
    assert world.children


def test_a_finished_training_does_nothing_more():
    world = finished()
    world.edit(suspend=True)
    world.settle(3)
    world.edit(suspend=False)
    world.settle(3)
    assert world.status.state == "Succeeded"
    assert sorted(world.jobs) == ["demo-1"]


def test_a_job_that_does_not_end_after_success_is_deleted():
    world = World()
    world.until_running()
    world.report("Succeeded")
    world.reconcile()
    world.settle(5)
    assert world.jobs["demo-1"].deleting is None
    world.wait(60)
    world.settle(2)
    assert not world.jobs
    assert world.status.state == "Succeeded"


@pytest.mark.parametrize("state", ["Succeeded", "Failed"])
def test_a_refused_deletion_leaves_a_finished_training_finished(state):
    world = World()
    world.edit(cleanupSecondsAfterFinished=100)
    world.until_running()
    world.report(state, reason="DataError" if state == "Failed" else None)
    world.reconcile()
    world.finish_job(ok=state == "Succeeded")
    world.wait(100)
    world.protected = {("RayJob", "demo-1")}
    world.settle(3)
    assert world.status.state == state
    assert world.is_true(state)
    assert (world.is_true("Degraded"), world.condition("Degraded").reason) == (True, "Forbidden")
    assert "RayJob demo-1 is protected" in world.condition("Degraded").message
    assert not world.children
    world.protected = set()
    world.settle(3)
    assert not world.jobs
    assert (world.status.state, world.is_true("Degraded")) == (state, False)
    assert len(world.status.attempts) == 1


def with_protected_records() -> World:
    """A world whose fifth attempt runs, and whose oldest RayJob has to be deleted but cannot be."""
    world = World()
    world.edit(failurePolicy={"maxRestarts": 10, "backoffSeconds": 0})
    world.protected = {("RayJob", "demo-1")}
    for _ in range(4):
        world.until_running()
        world.finish_job(ok=False)
        world.settle(2)
    world.until_running()
    return world


def test_a_refused_deletion_of_an_old_job_does_not_keep_a_running_attempt_from_its_changes():
    world = with_protected_records()
    assert sorted(world.jobs) == ["demo-1", "demo-2", "demo-3", "demo-4", "demo-5"]
    assert world.status.state == "Running"
    assert world.condition("Degraded").reason == "Forbidden"
    world.edit(rollout={"nodes": 4})
    world.reconcile()
    (cluster,) = world.clusters.values()
    assert [group.replicas for group in cluster.groups if group.name == "rollout"] == [4]
    assert world.observe().control.rolloutNodes == 4
    world.edit(suspend=True)
    world.reconcile()
    assert world.order.reason == "Suspend"
    world.obey()
    world.settle(3)
    assert world.status.state == "Suspended"
    assert world.is_true("Suspended")
    assert sorted(world.jobs) == ["demo-1", "demo-2", "demo-3", "demo-4"]


def test_a_job_that_waits_in_its_queue_and_cannot_be_deleted_keeps_the_next_attempt_from_starting():
    world = World(labels={"kueue.x-k8s.io/queue-name": "queue"})
    world.reconcile()
    world.protected = {("RayJob", "demo-1")}
    world.edit(train={"nodes": 1})
    world.settle(3)
    assert sorted(world.jobs) == ["demo-1"]
    assert "RayJob demo-1" in world.condition("Reconciling").message
    world.protected = set()
    world.settle(3)
    assert sorted(world.jobs) == ["demo-2"]
