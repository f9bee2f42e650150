"""The rollout pool's size."""

from dataclasses import replace

import pytest

from qwen35_operator.reconcile import acceptance
from qwen35_trainer.contract import ReplicaReport
from tests.operator.reconcile.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.until_running()
    return world


def replicas(world: World) -> int:
    (cluster,) = world.clusters.values()
    return cluster.groups[0].replicas


def test_more_nodes_grow_the_live_cluster(world):
    world.edit(rollout={"nodes": 4})
    world.reconcile()
    assert replicas(world) == 4
    assert world.observe().control.rolloutNodes == 4
    assert "rollout nodes 2 → 4" in {event.message for event in world.events}


def test_bounds_follow_a_size_beyond_them(world):
    world.edit(rollout={"nodes": 6, "maxNodes": 6})
    world.reconcile()
    (cluster,) = world.clusters.values()
    assert (cluster.groups[0].min_replicas, cluster.groups[0].max_replicas) == (1, 6)


def test_the_idlest_pods_go_first(world):
    world.edit(rollout={"nodes": 4})
    world.settle(3)
    pods = sorted(name for name in world.pods if "rollout" in name)
    world.report(
        replicas=[ReplicaReport(pods=(name,), idle=idle) for name, idle in zip(pods, (0.1, 0.9, 0.2, 0.8), strict=True)]
    )
    world.edit(rollout={"nodes": 2})
    world.reconcile()
    assert world.observe().control.leaving == (pods[1], pods[3])
    world.kuberay()
    assert sorted(name for name in world.pods if "rollout" in name) == [pods[0], pods[2]]


@pytest.fixture
def laned() -> World:
    """Three nodes, of which one is the straggler lane."""
    world = World()
    world.edit(
        rollout={"nodes": 3, "minNodes": 2, "stragglerLane": {"nodes": 1, "tensorParallel": 2, "afterTokens": 9}}
    )
    world.edit(accelerator={"profile": "CPU", "devicesPerNode": 2})
    world.until_running()
    return world


def test_the_lane_is_a_part_of_the_size(laned):
    assert {pool.name: (pool.desired, pool.ready) for pool in laned.status.pools}["rollout"] == (3, 3)
    writes = laned.writes
    laned.reconcile()
    assert laned.writes == writes
    laned.edit(rollout={"nodes": 4})
    laned.reconcile()
    (cluster,) = laned.clusters.values()
    assert {group.name: group.replicas for group in cluster.groups} == {"rollout": 3, "lane": 1, "train": 2}
    assert (cluster.groups[0].min_replicas, cluster.groups[0].max_replicas) == (1, 3)
    assert laned.observe().control.rolloutNodes == 4
    assert "rollout nodes 3 → 4" in {event.message for event in laned.events}


def test_the_pods_of_the_lane_stay_however_idle_they_are(laned):
    lane, *others = sorted(
        (name for name, pod in laned.pods.items() if pod.pool == "rollout"), key=lambda n: "lane" not in n
    )
    laned.report(
        replicas=[
            ReplicaReport(pods=(name,), idle=idle) for name, idle in zip([lane, *others], (1.0, 0.5, 0.1), strict=True)
        ]
    )
    laned.pods[lane] = replace(laned.pods[lane], ready=False)
    laned.edit(rollout={"nodes": 2})
    laned.reconcile()
    assert laned.observe().control.leaving == (others[0],)
    laned.kuberay()
    assert {name for name, pod in laned.pods.items() if pod.pool == "rollout"} == {lane, others[1]}


def test_in_a_cluster_without_a_group_for_the_lane_all_its_nodes_are_in_the_group_of_the_pool(laned):
    """Such a cluster was created by an operator of an earlier release."""
    (cluster,) = laned.clusters.values()
    pool, _, train = cluster.groups
    laned.clusters[cluster.name] = replace(cluster, groups=(replace(pool, replicas=3), train))
    laned.reconcile()
    assert replicas(laned) == 3
    laned.edit(rollout={"nodes": 4})
    laned.reconcile()
    assert replicas(laned) == 4


def test_pods_that_do_not_work_go_before_idle_ones(world):
    pods = sorted(name for name in world.pods if "rollout" in name)
    world.report(replicas=[ReplicaReport(pods=(pods[1],), idle=0.9), ReplicaReport(pods=(pods[0],), idle=0.0)])
    world.pods[pods[0]] = replace(world.pods[pods[0]], ready=False)
    world.edit(rollout={"nodes": 1})
    world.reconcile()
    assert world.observe().control.leaving == (pods[0],)


def test_the_nodes_of_one_replica_go_together(monkeypatch):
    """This release has no engine whose replicas span nodes, and would refuse the training."""
    monkeypatch.setattr(acceptance, "cannot_run", lambda spec: [])
    world = World()
    world.edit(rollout={"nodes": 4, "tensorParallel": 16, "minNodes": 2})
    world.until_running()
    pods = sorted(name for name in world.pods if "rollout" in name)
    mates = [(pods[0], pods[2]), (pods[1], pods[3])]
    world.report(replicas=[ReplicaReport(pods=pair, idle=0.5) for pair in mates])
    world.edit(rollout={"nodes": 2})
    world.reconcile()
    assert world.observe().control.leaving in mates


def test_rays_own_autoscaler_is_not_fought(world):
    (name,) = world.clusters
    world.clusters[name] = replace(world.clusters[name], autoscaled=True)
    world.edit(rollout={"nodes": 4})
    world.reconcile()
    assert replicas(world) == 2


def test_a_queued_attempt_says_so():
    world = World(labels={"kueue.x-k8s.io/queue-name": "rl"})
    world.settle(3)
    assert world.status.state == "Queued"
    assert not world.is_true("QuotaReserved")


def let_in_by_its_queue() -> World:
    """Attempt 1 runs and has reported a version."""
    world = World(labels={"kueue.x-k8s.io/queue-name": "rl"})
    world.settle(2)
    world.jobs["demo-1"] = replace(world.jobs["demo-1"], suspended=False)
    world.settle(3)
    world.report(update=1, versionTime=world.now.timestamp(), versionSeconds=1.0)
    world.reconcile()
    return world


def test_an_attempt_that_its_queue_evicts_waits_and_is_not_taken_for_stalled():
    world = let_in_by_its_queue()
    assert world.status.state == "Running"

    world.jobs["demo-1"] = replace(world.jobs["demo-1"], suspended=True, deployment="Suspended", cluster="")
    world.clusters.clear(), world.pods.clear()
    world.wait(3600)
    world.reconcile()
    assert world.status.state == "Queued"
    assert not world.is_true("QuotaReserved")

    world.jobs["demo-1"] = replace(world.jobs["demo-1"], suspended=False, deployment="")
    world.settle(3)
    assert world.status.attempts[-1].outcome == "Running"
    world.report(versionTime=world.now.timestamp() - 61, versionSeconds=1.0)
    world.reconcile()
    assert world.status.attempts[-1].reason == "Stalled"


def test_the_head_of_an_evicted_attempt_may_take_long_to_go():
    """As on a node that is lost: the pod object stays until the node is removed, and its last report gets older."""
    world = let_in_by_its_queue()
    running = world.jobs["demo-1"]
    (old,) = world.clusters.values()
    (head,) = [name for name, pod in world.pods.items() if pod.pool == "head"]
    evicted = replace(running, suspended=True)
    let_in = replace(running, deployment="", cluster="")
    leaving = replace(old, deleting=world.now)
    for job, clusters, state in (
        (evicted, [old], "Queued"),
        (replace(evicted, deployment="Suspending"), [leaving], "Queued"),
        (replace(evicted, deployment="Suspended", cluster=""), [leaving], "Queued"),
        (replace(running, deployment="Suspending"), [old], "Queued"),
        (replace(let_in, deployment="Suspended"), [old], "Queued"),
        (let_in, [leaving], "Starting"),
        (let_in, [], "Starting"),
        (replace(let_in, cluster="new"), [replace(old, name="new", uid="new", created=world.now), leaving], "Starting"),
    ):
        world.jobs["demo-1"] = job
        world.clusters = {cluster.name: cluster for cluster in clusters}
        for reason in ("", "NodeLost"):
            world.pods[head] = replace(world.pods[head], deleting=world.now if reason else None, reason=reason)
            world.wait(100)
            world.reconcile()
            assert world.status.attempts[-1].outcome == "Running", f"{reason} of {job} in {clusters}"
            assert world.status.state == state
            assert world.is_true("QuotaReserved") == (state == "Starting")


@pytest.fixture
def auto() -> World:
    world = World()
    world.edit(rollout={"nodes": 2, "minNodes": 1, "maxNodes": 3, "autoscale": {"stabilizationSeconds": 100}})
    world.until_running()
    world.wait(100)
    return world


def test_a_waiting_train_pool_grows_the_rollout_pool(auto):
    auto.report(trainIdle=0.6, rolloutIdle=0.05)
    auto.reconcile()
    assert auto.status.autoscale.nodes == 3
    assert "train idle 60%" in auto.status.autoscale.reason
    assert replicas(auto) == 3


def test_an_idle_rollout_pool_shrinks(auto):
    auto.report(trainIdle=0.0, rolloutIdle=0.8)
    auto.reconcile()
    assert auto.status.autoscale.nodes == 1
    assert replicas(auto) == 1


@pytest.mark.parametrize(("train", "rollout"), [(0.2, 0.4), (0.3, 0.5), (0.9, 0.9)])
def test_between_the_thresholds_nothing_moves(auto, train, rollout):
    auto.report(trainIdle=train, rolloutIdle=rollout)
    auto.reconcile()
    assert auto.status.autoscale is None


def test_after_a_change_it_waits_before_the_next(auto):
    auto.report(trainIdle=0.6, rolloutIdle=0.05)
    auto.settle(3)
    auto.report(trainIdle=0.0, rolloutIdle=0.9)
    auto.reconcile()
    assert auto.status.autoscale.nodes == 3
    auto.wait(100)
    auto.reconcile()
    assert auto.status.autoscale.nodes == 2


def test_it_never_leaves_its_bounds(auto):
    for _ in range(4):
        auto.report(trainIdle=0.9, rolloutIdle=0.0)
        auto.settle(3)
        auto.wait(100)
    assert replicas(auto) == 3


def test_what_autoscaling_chose_outlasts_the_attempt(auto):
    auto.report(trainIdle=0.6, rolloutIdle=0.05)
    auto.reconcile()
    auto.finish_job(ok=False)
    auto.settle()
    auto.wait(30)
    auto.settle(3)
    assert replicas(auto) == 3
    assert auto.spec["rollout"]["nodes"] == 2
