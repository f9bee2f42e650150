"""What holds up the next attempt: anything of an earlier one that may still write to the checkpoints, and too many changes."""

import itertools
from dataclasses import replace

import pytest

from qwen35_operator.reconcile.writes import Apply, RefusedWrite
from tests.operator.reconcile.world import START, World


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


def hang(world: World, *pools: str) -> list[str]:
    """KubeRay deletes the cluster, and nobody confirms the end of the pods of these pools. Returns their nodes."""
    world.clusters.clear()
    world.pods = {
        name: replace(pod, deleting=world.now, ended=False) for name, pod in world.pods.items() if pod.pool in pools
    }
    return [pod.node for pod in world.pods.values()]


def test_a_rollout_pod_whose_end_nobody_confirms_holds_up_the_next_attempt_for_two_minutes(failed):
    hang(failed, "rollout")
    failed.wait(119)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1"]
    failed.wait(1)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


@pytest.mark.parametrize("pool", ["train", "head"])
@pytest.mark.parametrize("state", ["Gone", "OutOfService"])
def test_a_pod_that_may_write_holds_up_the_next_attempt_until_there_is_a_proof_of_its_end(failed, pool, state):
    """A partitioned node may reach the storage although it does not reach the API server."""
    first, *others = hang(failed, pool)
    failed.nodes.update(dict.fromkeys(others, state))
    for _ in range(50):
        failed.wait(1000)
        failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1"]
    failed.nodes[first] = state
    failed.wait(failed.wanted_after)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


def test_a_pod_whose_containers_have_ended_writes_nothing_although_it_still_exists(failed):
    hang(failed, "train")
    failed.pods = {name: replace(pod, ended=True) for name, pod in failed.pods.items()}
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


def test_status_and_event_say_which_pod_on_which_node_is_waited_for_and_what_to_do(failed):
    hang(failed, "train")
    failed.wait(30)
    failed.reconcile()
    assert failed.condition("Reconciling").reason == "Cleaning"
    failed.wait(90)
    failed.reconcile()
    condition = failed.condition("Reconciling")
    assert (condition.reason, failed.is_true("Degraded")) == ("PodsNotEnded", True)
    pod = min(failed.pods)
    assert f"{pod} on node node-of-{pod}" in condition.message
    assert "node.kubernetes.io/out-of-service" in condition.message
    command = "kubectl annotate qwen35training/demo -n team rl.qwen35.io/force-start=2 --overwrite"
    assert condition.message.endswith(command)
    assert [event.message for event in failed.events if event.reason == "PodsNotEnded"] == [condition.message]
    before = failed.writes
    failed.wait(600)
    failed.reconcile()
    assert failed.writes == before, "the same message costs no write"


def test_without_the_right_to_read_nodes_the_message_says_so_and_other_proofs_count(failed):
    nodes = hang(failed, "train")
    failed.nodes.update(dict.fromkeys(nodes, "Unreadable"))
    failed.wait(600)
    failed.reconcile()
    assert "(the operator may not read nodes here)" in failed.condition("Reconciling").message
    failed.pods.clear()
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


def test_a_forced_start_waits_for_a_repair_that_is_refused(failed, monkeypatch):
    """Its pods would run without the NetworkPolicy that the operator wants."""
    hang(failed, "train")
    failed.force_start = "2"
    drifted = replace(failed.observe(), drifted=frozenset({("NetworkPolicy", "demo")}))
    apply = failed.apply

    def refuse(write):
        is_policy = isinstance(write, Apply) and write.manifest["kind"] == "NetworkPolicy"
        return RefusedWrite(write, "Forbidden", "a policy forbids it") if is_policy else apply(write)

    with monkeypatch.context() as patch:
        patch.setattr(failed, "observe", lambda: drifted)
        patch.setattr(failed, "apply", refuse)
        failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1"]
    assert failed.condition("Ready").reason == "Forbidden"
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


def test_the_users_word_counts_for_one_attempt(failed):
    hang(failed, "train")
    for value in ("", "1", "3", "2 ", "yes"):
        failed.force_start = value
        failed.wait(600)
        failed.reconcile()
        assert sorted(failed.jobs) == ["demo-1"], value
    failed.force_start = "2"
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]
    assert "ForceStarted" in {event.reason for event in failed.events}
    lost = dict(failed.pods)
    failed.settle(4)
    failed.report(attempt=2, update=1)
    failed.finish_job(ok=False)
    failed.reconcile()
    failed.clusters.clear()
    failed.pods = lost
    failed.wait(6000)
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"], "the annotation still has the value 2"


def test_the_users_word_does_not_count_while_a_cluster_is_not_deleted(failed):
    failed.force_start = "2"
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1"]
    failed.clusters = {name: replace(item, deleting=failed.now) for name, item in failed.clusters.items()}
    failed.reconcile()
    assert sorted(failed.jobs) == ["demo-1", "demo-2"]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_holds_up_nothing(failed, phase):
    failed.clusters.clear()
    failed.pods = {name: replace(pod, phase=phase, ready=False, ended=True) for name, pod in failed.pods.items()}
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


EVERY_SECONDS = 5


def edited_in_a_loop(world: World, *, seconds: int, change) -> list[int]:
    """Let a program edit the training every EVERY_SECONDS. Returns the seconds at which RayJobs were created."""
    created = []
    for second in range(0, seconds, EVERY_SECONDS):
        change(world, second // EVERY_SECONDS)
        before = set(world.jobs)
        world.reconcile()
        created += [second] * len(set(world.jobs) - before)
        world.kuberay()
        world.wait(EVERY_SECONDS)
    return created


CHANGES = {
    "another seed": lambda world, number: world.edit(seed=number),
    "suspend and resume": lambda world, number: world.edit(suspend=number % 2 == 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_program_that_edits_in_a_loop_gets_ever_fewer_clusters(change):
    created = edited_in_a_loop(World(), seconds=1500, change=CHANGES[change])
    assert 4 <= len(created) <= 11  # without the wait: 150
    waits = [after - before for before, after in itertools.pairwise(created)]
    assert waits[3:] == sorted(waits[3:])
    assert waits[-1] >= 320


def test_between_the_clusters_of_such_a_loop_there_are_no_events():
    world = World()
    created = edited_in_a_loop(world, seconds=600, change=CHANGES["another seed"])
    assert len(world.events) <= 2 * len(created)  # that one starts, and that it was stopped


def test_the_status_says_how_often_the_spec_changed_and_when_the_next_attempt_starts():
    world = World()
    for number in range(4):
        world.settle(4)
        world.edit(seed=number + 1)
        world.reconcile()
    world.settle(2)
    condition = world.condition("Reconciling")
    assert (world.status.state, condition.reason) == ("Starting", "ChangedTooOften")
    assert "4 attempts were stopped within an hour" in condition.message
    assert "10 s after the last stop" in condition.message
    assert not world.jobs
    assert 0 < world.wanted_after < 10
    world.wait(10)
    world.settle(2)
    assert sorted(world.jobs) == ["demo-5"]


def test_three_changes_in_an_hour_and_any_number_in_a_week_cost_no_wait():
    world = World()
    for number in range(8):
        for change in range(3):
            world.settle(4)
            world.edit(seed=3 * number + change + 1)
            world.reconcile()
            assert world.status.state in ("Suspending", "Starting")
        world.settle(4)
        assert world.condition("Reconciling").reason != "ChangedTooOften"
        assert len(world.jobs) == 1
        world.wait(3600)


def test_a_suspended_training_stays_suspended_during_the_wait_and_continues_after_it():
    world = World()
    edited_in_a_loop(world, seconds=120, change=CHANGES["another seed"])
    world.edit(suspend=True)
    world.settle(2)
    assert world.status.state == "Suspended"
    world.edit(suspend=False)
    world.reconcile()
    assert world.condition("Reconciling").reason == "ChangedTooOften"
    world.wait(600)
    world.settle(2)
    assert len(world.jobs) == 1


def test_failures_between_the_changes_hide_none_of_them():
    def change_or_fail(world: World, number: int) -> None:
        if number % 2 and world.jobs:
            world.report("Failed", reason="WorkerLost", message="a rank is gone")
        else:
            world.edit(seed=number)

    world = World()
    world.edit(failurePolicy={"maxRestarts": 1000, "backoffSeconds": 0})
    created = edited_in_a_loop(world, seconds=900, change=change_or_fail)
    assert "Failed" in {attempt.outcome for attempt in world.status.attempts}
    assert len(created) <= 25  # without the wait: 90


def with_stray_cluster(**fields) -> World:
    """A world whose first attempt has failed, and with a RayCluster that none of its RayJobs owns."""
    world = World()
    world.until_running()
    (cluster,) = world.clusters.values()
    world.finish_job(ok=False)
    world.reconcile()
    world.kuberay()
    world.clusters["copy"] = replace(cluster, name="copy", uid="copy", owner=None, attempt=0, **fields)
    return world


def test_a_cluster_that_no_job_owns_is_named_after_two_minutes():
    world = with_stray_cluster()
    world.wait(119)
    world.reconcile()
    assert world.condition("Reconciling").reason == "Cleaning"
    assert not world.is_true("Degraded")
    world.wait(31)
    world.reconcile()
    for kind in ("Reconciling", "Degraded"):
        assert world.condition(kind).reason == "ClusterNotOwned"
        assert "kubectl delete raycluster copy -n team" in world.condition(kind).message
    assert world.events[-1].reason == "ClusterNotOwned"
    assert sorted(world.jobs) == ["demo-1"]
    del world.clusters["copy"]
    world.reconcile()
    assert sorted(world.jobs) == ["demo-1", "demo-2"]
    assert not world.is_true("Degraded")


def test_a_cluster_that_is_being_deleted_is_only_waited_for():
    world = with_stray_cluster(deleting=START)
    world.wait(1000)
    world.reconcile()
    assert world.condition("Reconciling").reason == "Cleaning"


def test_the_user_can_start_in_spite_of_a_cluster_that_no_job_owns():
    world = with_stray_cluster()
    world.wait(150)
    world.reconcile()
    assert "rl.qwen35.io/force-start=2" in world.condition("Degraded").message
    world.force_start = "2"
    world.reconcile()
    assert sorted(world.jobs) == ["demo-1", "demo-2"]


def test_a_cluster_that_no_job_owns_is_named_while_a_training_is_suspended():
    world = with_stray_cluster()
    world.edit(suspend=True)
    world.wait(150)
    world.reconcile()
    assert world.status.state == "Suspending"
    assert world.condition("Degraded").reason == "ClusterNotOwned"
    assert "kubectl delete raycluster copy -n team" in world.condition("Degraded").message
    del world.clusters["copy"]
    world.reconcile()
    assert (world.status.state, world.is_true("Degraded")) == ("Suspended", False)
