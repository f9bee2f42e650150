"""How the end of an attempt is recognized, and what follows from it."""

from dataclasses import replace

import pytest

from qwen35_operator.reconcile import stall
from qwen35_trainer.contract import CheckpointReport
from tests.operator.reconcile.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.until_running()
    return world


def test_success_is_what_the_trainer_says(world):
    world.report("Succeeded", update=9)
    world.reconcile()
    assert world.status.state == "Succeeded"
    assert world.is_true("Succeeded")
    assert world.is_true("Ready")
    assert world.status.attempts[-1].outcome == "Succeeded"


def test_a_job_that_ends_well_without_the_trainers_word_has_failed(world):
    world.finish_job(ok=True)
    world.reconcile()
    assert world.status.state == "Restarting"
    assert world.status.attempts[-1].reason == "NoFinalState"
    assert "reported no final state" in world.status.attempts[-1].message


def test_the_success_of_an_earlier_attempt_changes_nothing(world):
    world.finish_job(ok=False)
    world.settle()
    world.wait(20)
    world.settle()
    world.report("Succeeded", attempt=1)
    world.settle(2)
    assert world.status.state == "Starting"


def test_a_failed_attempt_is_followed_by_the_next_after_the_backoff(world):
    world.finish_job(ok=False, message="NCCL timed out")
    world.reconcile()
    world.kuberay()
    assert world.wanted_after == 10
    world.wait(9)
    world.reconcile()
    assert sorted(world.jobs) == ["demo-1"]
    world.wait(1)
    world.reconcile()
    assert sorted(world.jobs) == ["demo-1", "demo-2"]
    assert world.status.restarts == 1


def test_the_backoff_doubles(world):
    waits = []
    for _ in range(2):
        world.finish_job(ok=False)
        world.reconcile()
        waits.append(world.wanted_after)
        world.wait(100)
        world.settle()
        world.report(update=1)
    assert waits == [10, 20]


def test_a_job_whose_restarts_are_used_up_has_failed(world):
    for _ in range(3):
        world.finish_job(ok=False, message="again")
        world.reconcile()
        world.wait(200)
        world.settle()
    assert world.status.state == "Failed"
    assert world.condition("Failed").reason == "RestartsExhausted"
    assert world.is_true("Stalled")
    assert world.status.restarts == 2
    assert len(world.status.attempts) == 3


def test_input_that_the_trainer_refuses_is_not_tried_again(world):
    world.report("Failed", reason="DataError", message="train.jsonl: no such file")
    world.reconcile()
    assert world.status.state == "Failed"
    assert "train.jsonl: no such file" in world.condition("Failed").message


def test_a_job_that_somebody_deletes_is_started_again(world):
    world.jobs.clear()
    world.reconcile()
    assert world.status.attempts[-1].reason == "JobDeleted"
    world.clusters.clear(), world.pods.clear()
    world.wait(30)
    world.reconcile()
    assert sorted(world.jobs) == ["demo-2"]


def test_an_interrupted_trainer_is_started_again_from_its_checkpoint(world):
    world.report("Stopped", checkpoint=CheckpointReport(uri="/c/update-000003", update=3, time=1.0))
    world.reconcile()
    assert world.status.attempts[-1].reason == "Interrupted"
    assert world.status.lastCheckpoint.uri == "/c/update-000003"


def test_where_the_model_was_written_stays_in_the_status_after_the_end(world):
    world.report("Succeeded", export=CheckpointReport(uri="/c/exports/update-000009", update=9, time=1.0))
    world.reconcile()
    world.reconcile()
    assert world.status.state == "Succeeded"
    assert (world.status.lastExport.uri, world.status.lastExport.update) == ("/c/exports/update-000009", 9)


def test_a_sidecar_that_fails_ends_no_attempt(world):
    world.fault("head", "SidecarFailed", 1)
    world.reconcile()
    assert (world.status.state, world.status.attempts[-1].fault) == ("Running", None)
    assert world.condition("Degraded").reason == "PodFault"
    assert "SidecarFailed" in world.condition("Degraded").message


@pytest.mark.parametrize("reason", ["Error", "NodeLost", "Evicted"])
def test_a_train_pod_that_fails_before_the_trainer_was_submitted_fails_the_attempt(reason):
    """KubeRay would replace it again and again, without a back-off."""
    world = World()
    world.reconcile()
    world.kuberay()
    assert world.jobs["demo-1"].deployment == "Initializing"
    name = world.fault("train", reason, 1)
    world.reconcile()
    failed = world.status.attempts[-1]
    assert (failed.outcome, failed.reason, failed.message) == ("Failed", reason, f"pod {name}: seen")
    assert failed.counted == (reason != "Evicted")
    assert (world.status.state, world.wanted_after) == ("Restarting", 10)


@pytest.mark.parametrize(("pool", "reason"), [("rollout", "Error"), ("train", "ImagePullBackOff")])
def test_a_start_waits_for_other_pods_that_do_not_work(pool, reason):
    world = World()
    world.reconcile()
    world.kuberay()
    world.fault(pool, reason)
    world.reconcile()
    assert (world.status.state, world.condition("Degraded").reason) == ("Starting", "PodFault")


def test_a_train_pod_that_fails_once_the_trainer_runs_is_the_trainers_to_report(world):
    world.fault("train", "Error", 1)
    world.reconcile()
    assert (world.status.state, world.condition("Degraded").reason) == ("Running", "PodFault")


def test_the_next_attempt_waits_until_the_earlier_pods_are_gone(world):
    world.finish_job(ok=False)
    world.reconcile()
    world.wait(60)
    world.reconcile()
    assert world.condition("Reconciling").reason == "Cleaning"
    assert sorted(world.jobs) == ["demo-1"]
    world.kuberay()
    world.reconcile()
    assert sorted(world.jobs) == ["demo-1", "demo-2"]


def test_no_new_version_for_long_is_a_failure(world):
    world.report(versionTime=world.now.timestamp(), versionSeconds=5.0)
    world.reconcile()
    assert 100 < world.wanted_after < 102
    world.wait(101)
    world.reconcile()
    assert world.status.attempts[-1].reason == "Stalled"
    world.wait(60)
    world.reconcile()
    assert world.jobs["demo-1"].deleting is not None


def test_an_attempt_is_not_stalled_by_a_time_in_which_no_report_could_arrive(world):
    world.report(versionTime=world.now.timestamp(), versionSeconds=5.0)
    world.reconcile()
    world.wait(600)
    world.reports_since = world.now
    world.reconcile()
    assert (world.status.state, len(world.status.attempts)) == ("Running", 1)
    assert 100 < world.wanted_after < 102
    world.wait(101)
    world.reconcile()
    assert world.status.attempts[-1].reason == "Stalled", "it could have reported since"


def test_what_the_trainer_warns_of_is_a_degraded_condition_while_it_lasts(world):
    world.report(warning="every call of reward judge failed")
    world.reconcile()
    degraded = world.condition("Degraded")
    assert (world.status.state, degraded.status, degraded.reason) == ("Running", "True", "TrainerWarning")
    assert degraded.message == "every call of reward judge failed"
    world.report(warning="")
    world.reconcile()
    assert world.condition("Degraded").status == "False"


@pytest.mark.parametrize(("skew", "message"), [(-3600, "3600 s behind"), (3600, "3600 s ahead of")])
def test_a_trainer_whose_clock_is_off_is_not_taken_for_stalled(world, skew, message):
    clock = world.now.timestamp() + skew
    world.report(versionTime=clock, versionSeconds=5.0, time=clock)
    world.reconcile()
    assert world.status.state == "Running"
    assert world.condition("Degraded").reason == "ClockSkew"
    assert message in world.condition("Degraded").message
    world.report(versionTime=clock - 301, versionSeconds=1.0, time=clock)
    world.reconcile()
    assert world.status.attempts[0].reason == "Stalled", "a stall is a stall, whatever the clock says"


def test_the_history_keeps_the_latest_attempts_and_counts_all():
    world = World()
    world.edit(failurePolicy={"maxRestarts": 1000, "backoffSeconds": 0})
    for _ in range(70):
        world.wait(3600)
        world.settle(3)
        world.finish_job(ok=False)
        world.reconcile()
        world.kuberay()
        world.jobs.clear()
    assert len(world.status.attempts) == 64
    assert world.status.restarts == 70
    assert world.status.attempts[-1].number == 70


@pytest.mark.parametrize("reason", ["", "OOMKilled"])
def test_the_head_of_a_copy_of_the_cluster_neither_replaces_the_head_nor_fails_the_attempt(world, reason):
    """Somebody has copied the RayCluster, or the RayJob under another name: its pods have the attempt's labels."""
    world.report(update=3)
    (head,) = [pod for pod in world.pods.values() if pod.pool == "head"]
    world.pods["copy"] = replace(head, name="copy", uid="copy", cluster="copy", ready=not reason, reason=reason)
    world.wait(10)
    world.report(update=4)
    world.reconcile()
    assert world.status.state == "Running"
    assert world.status.pools[0].ready == 1


def test_a_copy_of_the_cluster_does_not_hide_a_stall(world):
    """Its head is younger than the last report, as the head of an attempt that has not reported yet."""
    (head,) = [pod for pod in world.pods.values() if pod.pool == "head"]
    world.report(versionTime=world.now.timestamp() - 55, versionSeconds=1.0)
    world.reconcile()
    assert world.status.state == "Running"
    world.wait(10)
    world.pods["copy"] = replace(head, name="copy", uid="copy", cluster="copy", created=world.now)
    world.reconcile()
    assert world.status.attempts[-1].reason == "Stalled"


def test_only_the_cluster_that_the_job_names_is_the_attempts():
    world = World()
    world.until_running()
    (own,) = world.clusters.values()
    copy = replace(own, name="copy", uid="copy", failure="quota")
    world.clusters = {"copy": copy, own.name: own}
    world.edit(rollout={"nodes": 3})
    world.settle()
    assert (world.clusters["copy"].groups, world.clusters[own.name].groups[0].replicas) == (own.groups, 3)
    assert world.condition("Degraded").status == "False"


@pytest.mark.parametrize("gone", ["its pod", "the pods and the cluster"])
def test_an_attempt_whose_head_pod_is_gone_and_not_replaced_has_failed(world, gone):
    """While KubeRay is away, or when a quota or a webhook refuses another one."""
    world.report(update=3)
    world.reconcile()
    for name in [name for name, pod in world.pods.items() if pod.pool == "head" or gone != "its pod"]:
        del world.pods[name]
    if gone != "its pod":
        world.clusters.clear()
    world.reconcile()
    assert 0 < world.wanted_after <= stall.NO_HEAD_SECONDS
    world.wait(world.wanted_after - 1)
    world.reconcile()
    assert world.status.state == "Running"
    world.wait(1)
    world.reconcile()
    assert (world.status.state, world.status.attempts[-1].reason) == ("Restarting", "HeadLost")
    assert "KubeRay has created no other within 120 s of its last report" in world.status.attempts[-1].message


def test_a_new_leader_gives_a_head_pod_the_same_time(world):
    world.report(update=3)
    world.reconcile()
    world.wait(3600)
    world.pods = {name: pod for name, pod in world.pods.items() if pod.pool != "head"}
    world.reports_since = world.now
    world.reconcile()
    assert world.status.state == "Running"
    world.wait(stall.NO_HEAD_SECONDS)
    world.reconcile()
    assert world.status.attempts[-1].reason == "HeadLost"


def test_a_head_pod_that_was_replaced_under_its_own_name_is_another_one(world):
    """KubeRay names every head of a cluster alike with ENABLE_DETERMINISTIC_HEAD_POD_NAME."""
    world.report(update=3)
    world.reconcile()
    world.wait(20)
    head = next(name for name, pod in world.pods.items() if pod.pool == "head")
    world.pods[head] = replace(world.pods[head], uid="another", created=world.now)
    world.reconcile()
    assert (world.status.state, world.status.attempts[-1].reason) == ("Restarting", "HeadLost")


def test_a_job_on_which_kuberay_does_not_act_is_reported():
    """Its operator is down, does not watch this namespace, or another controller manages the job."""
    world = World()
    world.settle(1)
    world.jobs["demo-1"] = replace(world.jobs["demo-1"], deployment="", cluster="")
    world.clusters.clear(), world.pods.clear()
    world.reconcile()
    assert world.condition("Degraded").status == "False"
    assert 50 < world.wanted_after <= 60
    world.wait(world.wanted_after)
    world.reconcile()
    assert (world.condition("Degraded").status, world.condition("Degraded").reason) == ("True", "KubeRayInactive")
    assert "RayJob demo-1" in world.condition("Degraded").message
    assert world.wanted_after is None or world.wanted_after > 0
    world.kuberay()
    world.settle(1)
    assert world.condition("Degraded").status == "False"


def test_a_job_that_its_queue_has_admitted_again_is_not_reported_while_kuberay_begins():
    """KubeRay then removes its status for seconds."""
    world = World(labels={"kueue.x-k8s.io/queue-name": "q"})
    world.settle(1)
    world.admit()
    world.until_running()
    world.evict()
    world.reconcile()
    world.wait(600)
    world.admit()
    world.jobs["demo-1"] = replace(world.jobs["demo-1"], deployment="", cluster="")
    world.reconcile()
    assert world.condition("Degraded").status == "False"
    assert 50 < world.wanted_after <= 60


def test_an_attempt_whose_head_pod_was_replaced_has_failed(world):
    """However it went, and within the second of its last report: KubeRay would submit to the new one without counting."""
    world.report(update=3)
    head = next(name for name, pod in world.pods.items() if pod.pool == "head")
    del world.pods[head]
    world.reconcile()
    assert world.status.state == "Running", "that it is gone may be what a watch has not seen yet"
    world.kuberay()
    world.reconcile()
    assert world.status.state == "Restarting"
    assert world.status.attempts[-1].reason == "HeadLost"
    assert world.status.attempts[-1].counted
