"""The operator ends after its n-th write, for every n of every story; afterwards all is as if it had not.

The same is done against a real API server in tests/controlplane; here every n costs a millisecond.
"""

from collections.abc import Callable
from functools import partial

import pytest

from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from qwen35_trainer.contract import ReplicaReport
from tests.operator.reconcile.world import World


def create(world: World, step) -> None:
    step()
    world.kuberay()
    step()
    world.report(update=1, version=1)
    step()


def suspend(world: World, step) -> None:
    create(world, step)
    order_a_stop(world, step)


def order_a_stop(world: World, step) -> None:
    """Until its pods are gone."""
    world.edit(suspend=True)
    step()
    world.obey()
    step()
    world.kuberay()
    step()


def resume(world: World, step) -> None:
    suspend(world, step)
    world.edit(suspend=False)
    create(world, step)


def fail_and_restart(world: World, step) -> None:
    create(world, step)
    world.finish_job(ok=False, reason="AppFailed", message="lost")
    step()
    world.kuberay()
    step()
    world.wait(60)
    create(world, step)


def scale(world: World, step) -> None:
    create(world, step)
    world.edit(rollout={"nodes": 4})
    step()
    world.kuberay()
    step()
    world.edit(rollout={"nodes": 1})
    step()
    world.kuberay()
    step()


def succeed(world: World, step) -> None:
    create(world, step)
    world.report("Succeeded", update=9, version=9)
    step()
    world.finish_job(ok=True)
    step()
    world.kuberay()
    step()


def delete_the_job(world: World, step) -> None:
    create(world, step)
    world.jobs.clear(), world.clusters.clear(), world.pods.clear()
    step()
    world.wait(60)
    create(world, step)


def delete(world: World, step) -> None:
    """Its children go with it, which is the garbage collector's work."""
    create(world, step)
    world.delete()
    step()


def delete_with_a_last_checkpoint(world: World, step) -> None:
    world.finalizers = (LAST_CHECKPOINT,)
    create(world, step)
    world.delete()
    step()
    world.obey()
    step()


def shrink(world: World, step) -> None:
    """The pod that leaves drains first."""
    create(world, step)
    pods = sorted(name for name in world.pods if "rollout" in name)
    for drained in (None, pods[0]):
        world.report(replicas=[ReplicaReport(pods=(pod,), idle=0.0, drained=pod == drained) for pod in pods])
        world.edit(rollout={"nodes": 1})
        step()
    world.kuberay()
    step()


def life(world: World, step) -> None:
    """All of it in one, as tests/controlplane/scenarios.py plays it on a real API server."""
    scale(world, step)
    order_a_stop(world, step)
    world.edit(suspend=False)
    create(world, step)
    world.finish_job(ok=False, reason="AppFailed", message="lost")
    step()
    world.kuberay()
    step()
    world.wait(60)
    create(world, step)
    world.delete()
    step()


SCENARIOS = [
    *(create, suspend, resume, fail_and_restart, scale, shrink, succeed, delete_the_job, delete),
    *(delete_with_a_last_checkpoint, life),
]


def undisturbed(scenario) -> World:
    world = World()
    scenario(world, partial(until_nothing_is_written, world, world.reconcile))
    return world


def until_nothing_is_written(world: World, reconcile: Callable[[], bool]) -> None:
    """Reconcile until it has completed without a write. Another one would decide the same: the time is the same too."""
    for _ in range(12):
        before = world.writes
        if reconcile() and world.writes == before:
            return
    raise AssertionError("each of 12 reconciles has written")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_crash_after_any_write_changes_nothing_in_the_end(scenario):
    calm = undisturbed(scenario)
    assert calm.writes > 5
    for number in range(calm.writes):
        world = World()
        crashed = False

        def reconcile(world=world, number=number) -> bool:
            nonlocal crashed
            if crashed or world.writes > number:
                return world.reconcile()
            crashed = not world.reconcile(writes=number - world.writes)
            return not crashed

        scenario(world, partial(until_nothing_is_written, world, reconcile))
        assert crashed
        assert world.spent() == calm.spent(), f"after write {number}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_settled_training_is_not_written_to(scenario):
    world = undisturbed(scenario)
    before = world.writes
    for _ in range(3):
        world.reconcile()
    assert world.writes == before
