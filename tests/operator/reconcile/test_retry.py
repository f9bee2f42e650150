"""A failed training is tried again when its annotation rl.qwen35.io/retry changes."""

import pytest

from tests.operator.reconcile.world import World


def failed(**policy) -> World:
    world = World()
    world.edit(failurePolicy={"maxRestarts": 0, **policy})
    world.until_running()
    world.report("Failed", reason="DataError", message="no such file")
    world.reconcile()
    world.finish_job(ok=False)
    world.settle(3)
    assert world.status.state == "Failed"
    return world


def test_a_new_value_starts_the_next_attempt_immediately_and_each_value_does_so_once():
    world = failed()
    world.retry = "1"
    world.reconcile()
    assert sorted(world.jobs) == ["demo-1", "demo-2"]
    assert not world.is_true("Failed")
    assert "Retried" in {event.reason for event in world.events}
    world.settle(4)
    world.report("Failed", attempt=2, reason="DataError")
    world.settle(3)
    assert world.status.state == "Failed"
    assert sorted(world.jobs) == ["demo-1", "demo-2"]
    world.retry = "2"
    world.finish_job(ok=False)
    world.settle(3)
    assert "demo-3" in world.jobs


def test_all_restarts_are_left_again():
    world = World()
    world.edit(failurePolicy={"maxRestarts": 1})
    world.until_running()
    for _ in range(2):
        world.finish_job(ok=False)
        world.reconcile()
        world.wait(100)
        world.settle(3)
    assert world.condition("Failed").reason == "RestartsExhausted"
    world.retry = "again"
    world.settle(3)
    assert (world.status.restarts, world.status.state) == (0, "Starting")
    world.finish_job(ok=False)
    world.reconcile()
    assert (world.status.restarts, world.status.state, world.wanted_after) == (1, "Restarting", 10)


def test_a_value_from_before_the_failure_changes_nothing():
    world = World()
    world.retry = "1"
    world.edit(failurePolicy={"maxRestarts": 0})
    world.until_running()
    world.report("Failed", reason="DataError")
    world.settle(3)
    assert world.status.state == "Failed"


@pytest.mark.parametrize("suspended", [False, True])
def test_a_success_is_not_tried_again(suspended):
    world = World()
    world.until_running()
    world.report("Succeeded")
    world.reconcile()
    world.edit(suspend=suspended)
    world.retry = "1"
    world.settle(3)
    assert world.status.state == "Succeeded"
    assert sorted(world.jobs) == ["demo-1"]


def test_a_deadline_that_is_over_still_is():
    world = World()
    world.edit(activeDeadlineSeconds=100)
    world.until_running()
    world.wait(200)
    world.reconcile()
    world.obey()
    world.settle(3)
    assert world.condition("Failed").reason == "DeadlineExceeded"
    world.retry = "1"
    world.settle(3)
    assert world.condition("Failed").reason == "DeadlineExceeded"
    world.edit(activeDeadlineSeconds=10_000)
    world.retry = "2"
    world.settle(3)
    world.wait(60)  # until the RayJob of the stopped attempt is deleted
    world.settle(4)
    assert world.status.state == "Starting"
