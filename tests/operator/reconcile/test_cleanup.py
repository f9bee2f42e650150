"""What is left behind, and for how long."""

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
