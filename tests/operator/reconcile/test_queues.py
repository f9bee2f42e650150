"""Attempts under a queue: admission, eviction, and what counts meanwhile."""

from dataclasses import replace

import pytest

from tests.operator.reconcile.world import World

QUEUE = {"kueue.x-k8s.io/queue-name": "rl"}
LAST_WORDS = (
    {"state": "Stopped", "reason": "Interrupted", "message": "saved after a SIGTERM"},
    {"state": "Failed", "reason": "WorkerLost", "message": "a train worker was lost"},
)
"""What a trainer reports whose pods are deleted: the head goes first, or the workers do."""


@pytest.fixture
def world() -> World:
    """Attempt 1 has been admitted and runs."""
    world = World(labels=QUEUE)
    world.settle(2)
    world.admit()
    world.report(update=1, version=1)
    world.reconcile()
    assert world.status.state == "Running"
    return world


def newest(world: World):
    return world.status.attempts[-1]


def test_six_evictions_of_a_trainer_that_reports_them_count_no_restart(world):
    """One more than `maxRestarts` would allow, if they counted."""
    for eviction in range(6):
        world.evict(report=LAST_WORDS[eviction % 2])
        assert world.status.state == "Queued"
        world.wait(3600)
        world.reconcile()
        world.admit()
        assert world.status.state == "Starting", "the last words of the evicted trainer count for nothing now"
        world.report(state="Running", reason=None, update=2 + eviction, version=2 + eviction)
        world.reconcile()
        assert world.status.state == "Running"
    assert [(attempt.outcome, attempt.evictions) for attempt in world.status.attempts] == [("Running", 6)]
    assert (world.status.restarts, list(world.jobs)) == (0, ["demo-1"])


def test_a_failure_after_an_eviction_is_one(world):
    world.evict(report=LAST_WORDS[0])
    world.admit()
    world.report("Failed", reason="WorkerLost")
    world.reconcile()
    assert (newest(world).outcome, newest(world).reason) == ("Failed", "WorkerLost")


def test_success_ends_an_evicted_attempt(world):
    world.evict(report={"state": "Succeeded", "update": 9})
    assert world.status.state == "Succeeded"


def test_an_evicted_trainer_of_an_earlier_release_does_not_name_its_cluster(world):
    world.report(cluster=None)
    (old,) = world.clusters
    world.evict()
    world.progress = world.progress.model_copy(update={"state": "Failed", "reason": "WorkerLost", "cluster": None})
    world.wait(1)
    world.admit()
    assert list(world.clusters) != [old]
    assert newest(world).outcome == "Running"
    world.wait(10)
    world.progress = world.progress.model_copy(update={"time": world.now.timestamp()})
    world.written = world.now
    world.reconcile()
    assert newest(world).reason == "WorkerLost", "what is written in the present cluster counts"


@pytest.mark.parametrize(
    ("reason", "expected", "state"), [("WorkerLost", "Evicted", "Restarting"), ("DataError", "DataError", "Failed")]
)
def test_a_job_that_ends_while_its_queue_evicts_it_cannot_be_resumed(world, reason, expected, state):
    """KubeRay suspends no job that has ended."""
    world.jobs["demo-1"] = replace(world.jobs["demo-1"], suspended=True)
    world.report("Failed", reason=reason, message="as it happened")
    world.reconcile()
    assert newest(world).outcome == "Running"
    world.finish_job(ok=False)
    world.reconcile()
    assert (newest(world).reason, world.status.state, world.status.restarts) == (expected, state, 0)


def test_a_deleted_job_has_ended_although_its_queue_held_it(world):
    world.evict()
    world.jobs.clear()
    world.reconcile()
    assert newest(world).reason == "JobDeleted"


def test_the_deadline_waits_while_the_queue_holds_the_attempt_back():
    world = World(labels=QUEUE)
    world.edit(activeDeadlineSeconds=3600)
    world.reconcile()
    world.wait(7200)
    world.reconcile()
    assert world.status.state == "Queued"
    world.admit()
    world.report(update=1)
    world.wait(3000)
    world.reconcile()
    assert newest(world).outcome == "Running"
    world.evict()
    world.wait(7200)
    world.reconcile()
    assert world.status.state == "Queued"
    assert 3000 <= newest(world).activeSeconds < 3100
    world.admit()
    world.report(update=2)
    world.reconcile()
    assert world.order is None
    world.wait(600)
    world.reconcile()
    assert world.order.reason == "DeadlineExceeded"
    world.obey()
    world.reconcile()
    assert world.condition("Failed").reason == "DeadlineExceeded"
    assert 3600 <= world.status.activeSeconds < 3700


def test_an_attempt_of_an_earlier_release_has_been_active_since_its_start():
    world = World()
    world.until_running()
    (attempt,) = world.status.attempts
    world.status = world.status.model_copy(update={"attempts": (attempt.model_copy(update={"activeSince": None}),)})
    world.reconcile()
    assert newest(world).activeSince == newest(world).startTime


def test_suspending_an_evicted_training_waits_for_no_trainer(world):
    world.evict()
    world.edit(suspend=True)
    world.settle(2)
    assert world.status.state == "Suspended"


def test_an_order_to_an_attempt_that_is_evicted_then_waits_for_no_trainer(world):
    world.edit(suspend=True)
    world.reconcile()
    assert world.order is not None
    world.evict(report=LAST_WORDS[0])
    world.settle(2)
    assert world.status.state == "Suspended"
    assert newest(world).outcome == "Suspended"


def replicas(world: World) -> int:
    (cluster,) = world.clusters.values()
    return cluster.groups[0].replicas


@pytest.mark.parametrize("elastic", [False, True])
def test_no_node_is_added_to_those_that_the_queue_admitted(elastic):
    """Whatever the job says about elasticity: Kueue would not know of such nodes."""
    world = World(labels=QUEUE | ({"kueue.x-k8s.io/elastic-job": "true"} if elastic else {}))
    world.settle(2)
    world.admit()
    world.report(update=1)
    world.edit(rollout={"nodes": 4})
    world.settle(2)
    assert replicas(world) == 2
    assert world.condition("Degraded").reason == "NodesFixedByQueue"
    assert "admitted 2 rollout nodes" in world.condition("Degraded").message
    assert world.observe().control.rolloutNodes == 2
    world.edit(rollout={"nodes": 1})
    world.settle(2)
    assert replicas(world) == 1, "admitted nodes may be left unused"
    world.edit(rollout={"nodes": 2})
    world.settle(2)
    assert replicas(world) == 2
    assert not world.is_true("Degraded")


def test_the_queue_of_the_job_counts_and_not_the_label_of_the_training(world):
    """A user who removes the label from the training gets no nodes outside of the quota."""
    world.labels = {}
    world.edit(rollout={"nodes": 4})
    world.settle(2)
    assert replicas(world) == 2


def test_nodes_that_somebody_added_under_a_queue_are_removed(world):
    (name,) = world.clusters
    groups = world.clusters[name].groups
    world.clusters[name] = replace(world.clusters[name], groups=(replace(groups[0], replicas=4), *groups[1:]))
    world.reconcile()
    assert replicas(world) == 2


def test_autoscaling_stays_within_what_the_queue_admitted():
    world = World(labels=QUEUE)
    world.edit(rollout={"nodes": 2, "minNodes": 1, "maxNodes": 3, "autoscale": {"stabilizationSeconds": 100}})
    world.settle(2)
    world.admit()
    world.report(update=1)
    world.wait(100)
    world.report(trainIdle=0.6, rolloutIdle=0.05)
    world.reconcile()
    assert world.status.autoscale is None
    world.report(trainIdle=0.0, rolloutIdle=0.8)
    world.reconcile()
    assert (world.status.autoscale.nodes, replicas(world)) == (1, 1)
