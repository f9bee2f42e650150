"""The rollout pool's size."""

from dataclasses import replace

import pytest

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


def drains(world: World, pods: list[str], drained: set[str], **fields) -> None:
    """The trainer reports one replica in each pod, and which of them are drained."""
    world.report(replicas=[ReplicaReport(pods=(name,), idle=0.5, drained=name in drained) for name in pods], **fields)


def test_pods_are_removed_when_their_replicas_have_drained(world):
    pods = sorted(name for name in world.pods if "rollout" in name)
    drains(world, pods, set())
    world.edit(rollout={"nodes": 1})
    world.reconcile()
    control = world.observe().control
    assert (control.leaving, control.rolloutNodes) == ((pods[0],), 1)
    assert replicas(world) == 2
    assert world.wanted_after == 600  # async.stallSeconds
    assert "Draining" in {event.reason for event in world.events}

    world.wait(30)
    drains(world, pods, set(), update=2)
    world.reconcile()
    assert (replicas(world), world.wanted_after) == (2, 570)
    assert world.observe().control == control

    drains(world, pods, {pods[0]})
    world.settle(2)
    assert replicas(world) == 1
    assert sorted(name for name in world.pods if "rollout" in name) == [pods[1]]
    world.reconcile()
    assert (world.observe().control.leaving, world.observe().control.leavingSince) == ((), None)


def test_a_drain_ends_after_the_limit(world):
    pods = sorted(name for name in world.pods if "rollout" in name)
    drains(world, pods, set())
    world.edit(rollout={"nodes": 1})
    world.reconcile()
    world.wait(599)
    world.reconcile()
    assert replicas(world) == 2
    world.wait(1)
    world.reconcile()
    assert replicas(world) == 1


def test_a_drain_is_called_off_when_the_nodes_are_wanted_again(world):
    pods = sorted(name for name in world.pods if "rollout" in name)
    drains(world, pods, set())
    world.edit(rollout={"nodes": 1})
    world.reconcile()
    world.edit(rollout={"nodes": 2})
    world.reconcile()
    assert (world.observe().control.leaving, replicas(world)) == ((), 2)
    world.wait(700)
    world.edit(rollout={"nodes": 1})
    world.reconcile()
    assert (replicas(world), world.wanted_after) == (2, 600)


def test_a_pod_without_a_replica_has_nothing_to_drain(world):
    pods = sorted(name for name in world.pods if "rollout" in name)
    world.pods[pods[1]] = replace(world.pods[pods[1]], ready=False)
    drains(world, pods[:1], set())
    world.edit(rollout={"nodes": 1})
    world.reconcile()
    assert (world.observe().control.leaving, replicas(world)) == ((pods[1],), 1)


def starting(nodes: int, least: int, unplaced: int, **rollout: object) -> World:
    """An attempt whose pods all work, except some of the rollout pool, for which there is no node."""
    world = World()
    world.edit(rollout={"nodes": nodes, "minNodes": least, "maxNodes": nodes} | rollout)
    world.reconcile(), world.kuberay(), world.reconcile()
    pods = sorted(name for name in world.pods if "rollout" in name)
    for name in pods[:unplaced]:
        world.pods[name] = replace(world.pods[name], node="", reason="Unschedulable")
    world.settle(2)
    return world


def test_an_attempt_starts_with_the_nodes_that_there_are_if_they_are_enough():
    world = starting(nodes=4, least=2, unplaced=2)
    assert world.status.state == "Starting"
    assert 290 < world.wanted_after <= 300
    world.wait(world.wanted_after)
    world.reconcile()
    assert replicas(world) == 2
    assert world.observe().control.rolloutNodes == 4  # replicas for them stay pending
    assert "rollout nodes 4 → 2: the others have no node after 300 s, or do not work after 1800 s" in {
        e.message for e in world.events
    }
    world.kuberay()
    assert world.jobs["demo-1"].deployment == "Running"  # KubeRay has submitted the trainer
    world.reconcile()
    assert replicas(world) == 4
    assert len(world.status.attempts) == 1


def test_an_attempt_starts_without_a_node_that_is_not_enough_for_one_more_replica():
    world = starting(nodes=4, least=2, unplaced=1, engine="VLLM", tensorParallel=16)
    world.wait(world.wanted_after)
    world.reconcile()
    assert replicas(world) == 2


@pytest.mark.parametrize(("least", "unplaced"), [(4, 1), (3, 2)])
def test_an_attempt_waits_for_the_nodes_that_it_needs(least, unplaced):
    world = starting(nodes=4, least=least, unplaced=unplaced)
    world.wait(3600)
    world.reconcile()
    assert (replicas(world), world.status.state) == (4, "Starting")


@pytest.mark.parametrize(("pool", "seconds"), [("rollout", 1790), ("train", 36000), ("head", 36000)])
def test_an_attempt_waits_for_pods_that_have_a_node_and_for_other_pools(pool, seconds):
    world = starting(nodes=4, least=2, unplaced=1)
    name = max(name for name, pod in world.pods.items() if pod.pool == pool)
    world.pods[name] = replace(world.pods[name], ready=False, reason="ImagePullBackOff")
    world.wait(seconds)
    world.reconcile()
    assert replicas(world) == 4


def test_a_pod_that_gets_its_node_late_has_the_same_time_to_work():
    """As with accelerators that a cloud does not have for an hour. The other pods pull the same image."""
    world = starting(nodes=4, least=2, unplaced=0)
    world.wait(3600)
    late = [name for name, pod in world.pods.items() if pod.pool == "rollout"][2:]
    for name in late:
        world.pods[name] = replace(world.pods[name], ready=False, unready_since=world.now)
    world.jobs["demo-1"] = replace(world.jobs["demo-1"], deployment="Initializing")
    world.reconcile()
    assert (replicas(world), world.wanted_after) == (4, 1800)
    world.wait(1800)
    world.reconcile()
    assert replicas(world) == 2


def test_an_attempt_starts_without_a_pod_whose_node_does_not_make_it_work():
    """A node with a full disk, or without a network."""
    world = starting(nodes=4, least=2, unplaced=0)
    name = min(name for name, pod in world.pods.items() if pod.pool == "rollout")
    world.pods[name] = replace(world.pods[name], ready=False, reason="ImagePullBackOff")
    world.jobs["demo-1"] = replace(world.jobs["demo-1"], deployment="Initializing")
    world.reconcile()
    assert 1790 < world.wanted_after <= 1800
    world.wait(world.wanted_after)
    world.reconcile()
    assert replicas(world) == 3
    (cluster,) = world.clusters.values()
    assert cluster.groups[0].leaving == (name,)


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


def test_the_nodes_of_one_replica_go_together():
    world = World()
    world.edit(rollout={"engine": "VLLM", "nodes": 4, "tensorParallel": 16, "minNodes": 2})
    world.until_running()
    pods = sorted(name for name in world.pods if "rollout" in name)
    mates = [(pods[0], pods[2]), (pods[1], pods[3])]
    world.report(replicas=[ReplicaReport(pods=pair, idle=0.5) for pair in mates])
    world.edit(rollout={"nodes": 2})
    world.reconcile()
    assert world.observe().control.leaving in mates


def test_what_is_left_of_a_replica_that_lost_a_node_goes_before_a_whole_one():
    world = World()
    world.edit(rollout={"engine": "VLLM", "nodes": 4, "tensorParallel": 16, "minNodes": 2})
    world.until_running()
    pods = sorted(name for name in world.pods if "rollout" in name)
    world.report(replicas=[ReplicaReport(pods=(pods[0], pods[3]), idle=0.9)])
    world.pods[pods[2]] = replace(world.pods[pods[2]], ready=False)
    world.edit(rollout={"nodes": 2})
    world.reconcile()
    assert set(world.observe().control.leaving) == {pods[1], pods[2]}


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
        (replace(let_in, cluster="new", deployment="Initializing"), [], "Starting"),
        (replace(let_in, cluster="new", deployment="Initializing"), [leaving], "Starting"),
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


def test_an_edit_of_the_size_replaces_what_autoscaling_chose(auto):
    auto.report(trainIdle=0.6, rolloutIdle=0.05)
    auto.reconcile()
    assert (auto.status.autoscale.nodes, auto.status.autoscale.specNodes) == (3, 2)
    auto.report(trainIdle=0.2, rolloutIdle=0.2)
    auto.edit(rollout={"nodes": 1, "minNodes": 1, "maxNodes": 3, "autoscale": {"stabilizationSeconds": 100}})
    auto.reconcile()
    assert (auto.status.autoscale, replicas(auto)) == (None, 1)


def test_a_choice_is_forgotten_with_the_block(auto):
    auto.report(trainIdle=0.6, rolloutIdle=0.05)
    auto.reconcile()
    del auto.spec["rollout"]["autoscale"]
    auto.edit()
    auto.reconcile()
    assert (auto.status.autoscale, replicas(auto)) == (None, 2)


def test_what_autoscaling_chose_outlasts_the_attempt(auto):
    auto.report(trainIdle=0.6, rolloutIdle=0.05)
    auto.reconcile()
    auto.finish_job(ok=False)
    auto.settle()
    auto.wait(30)
    auto.settle(3)
    assert replicas(auto) == 3
    assert auto.spec["rollout"]["nodes"] == 2
