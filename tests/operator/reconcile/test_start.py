"""What holds up the next attempt: anything of an earlier one that may still write to the checkpoints."""

from dataclasses import replace

import pytest

from tests.operator.reconcile.world import World


@pytest.fixture
def failed() -> World:
    """The first attempt has failed, and its backoff is over; its cluster and pods are still there."""
    world = World()
    world.until_running()
    world.finish_job(ok=False)
    world.reconcile()
    world.wait(60)
    assert world.clusters
    assert world.pods
    return world


def test_a_pod_that_nobody_deletes_holds_up_the_next_attempt(failed):
    failed.clusters.clear()
    failed.wait(3600)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1"]
    assert failed.condition("Reconciling").reason == "Cleaning"
    failed.pods.clear()
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


def test_a_cluster_without_pods_holds_up_the_next_attempt(failed):
    failed.pods.clear()
    failed.wait(3600)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1"]
    failed.clusters.clear()
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


def test_a_pod_whose_end_nobody_confirms_holds_up_the_next_attempt_for_two_minutes(failed):
    failed.clusters.clear()
    failed.pods = {name: replace(pod, deleting=failed.now) for name, pod in failed.pods.items()}
    failed.wait(119)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1"]
    failed.wait(1)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_holds_up_nothing(failed, phase):
    failed.clusters.clear()
    failed.pods = {name: replace(pod, phase=phase, ready=False) for name, pod in failed.pods.items()}
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


def test_the_message_says_how_far_the_start_is():
    """If KubeRay cannot reach the head, the start stays at the second message."""
    world, messages = World(), []
    world.settle(4)
    (job,), (cluster,) = world.jobs.values(), world.clusters.values()
    for state, deployment in [("", "Initializing"), ("ready", "Initializing"), ("ready", "Running")]:
        world.clusters[cluster.name], world.jobs[job.name] = (
            replace(cluster, state=state),
            replace(job, deployment=deployment),
        )
        world.reconcile()
        messages.append(world.condition("Ready").message)
    assert messages == [
        "attempt 1: its cluster is starting",
        "attempt 1: KubeRay submits the trainer to port 8265 of the head",
        "attempt 1: the trainer is starting",
    ]
