"""A training from apply to the end: what it makes, what it says, what it leaves."""

from pathlib import Path

import pytest

from qwen35_operator.reconcile.new_status import MIN_PROGRESS_SECONDS
from tests.controlplane.live_training import CHILDREN, LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.patience import PATIENCE

TERMINAL = 80
POOLS = {"head": 1, "rollout": 2, "train": 1}

pytestmark = pytest.mark.worlds("memory")


def settle(live_training: LiveTraining) -> None:
    """It trains on all nodes, and the status says so: from here on only reports change it."""
    for pool, nodes in POOLS.items():
        live_training.until_pods(pool, nodes)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    live_training.until(
        lambda: {item["name"]: item["ready"] for item in live_training.status["pools"]} == POOLS, "all nodes are ready"
    )


@pytest.mark.worlds("memory", "real")
def test_a_training_runs_from_accepted_to_succeeded(live_training: LiveTraining, ray_jobs: None, tmp_path: Path):
    seen = tmp_path / "seen"
    begin, end = (
        [{"report": {"updates": 6}}, {"await": str(seen)}],
        [{"report": {"update": 6}}, {"succeed": "all done"}],
    )
    live_training.apply(script=[[*begin, {"publish": 5}, *end]])
    live_training.until_condition("Accepted", "True", "Accepted")
    live_training.until_condition("ClusterReady", "True", "NodesReady")
    live_training.until_condition("RolloutReady", "True", "NodesReady")
    live_training.until(
        lambda: live_training.status.get("progress", {}).get("totalUpdates") == 6, "progress is mirrored"
    )
    seen.touch()
    live_training.until_state("Succeeded")

    status = live_training.status
    assert status["progress"]["update"] == 6
    assert status["lastCheckpoint"]["update"] == 6
    assert status["observedGeneration"] == live_training.body["metadata"]["generation"]
    (attempt,) = status["attempts"]
    assert (attempt["outcome"], attempt["message"]) == ("Succeeded", "attempt 1: all done")
    assert live_training.condition("Succeeded") == live_training.condition("Ready") == ("True", "Succeeded")
    assert {live_training.condition(kind)[0] for kind in ("Reconciling", "Stalled", "Failed", "Degraded")} == {"False"}
    live_training.until(
        lambda: live_training.announced("AttemptStarted") and live_training.announced("Succeeded"),
        "events tell the story",
    )

    # The job's own end is real: Ray has run it, and KubeRay has seen that.
    live_training.until(lambda: live_training.job_state() == "Complete", "KubeRay completes the job")
    job = live_training.job()
    assert job is not None
    assert job["status"]["jobStatus"] == "SUCCEEDED"
    live_training.until(lambda: not live_training.mine("pods"), "the pods are gone")


@pytest.mark.worlds("real")
def test_the_columns_fit_a_terminal(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    live_training.report(update=123456, version=123456, reward=0.987654321, lagMean=1.25)
    live_training.until_state("Running")
    lines = live_training.kubectl("get", "q35").splitlines()
    assert lines[0].split() == ["NAME", "STATE", "READY", "UPDATE", "WEIGHTS", "REWARD", "ROLLOUT", "AGE"]
    assert [lines[1].split()[place] for place in (0, 1, 3, 4)] == ["demo", "Running", "123456", "123456"]
    # A name of twelve letters in the place of "demo".
    assert max(len(line) for line in lines) + len("qwen35-0.8b-") - len("demo") <= TERMINAL


@pytest.mark.worlds("real")
def test_kubectl_waits_for_conditions(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    live_training.report("Succeeded", message="enough")
    live_training.kubectl("wait", "q35/demo", "--for=condition=Succeeded", f"--timeout={PATIENCE:.0f}s")


def looks(operator: OperatorProcess) -> float:
    """Reconciles that are done, and came to an end."""
    return operator.metrics()['qwen35_reconciles_total{result="done"}']


def test_an_idle_training_is_not_written_to(live_training: LiveTraining, operator: OperatorProcess):
    live_training.apply()
    settle(live_training)
    # Late events of KubeRay and the pods may still be written in a first round; heartbeats and their times never are.
    written = []
    for _ in range(3):
        before = live_training.body["metadata"]["resourceVersion"]
        for _ in range(4):
            looked = looks(operator)
            live_training.report()
            live_training.until(lambda looked=looked: looks(operator) > looked, "the operator has looked at the report")
        written.append(live_training.body["metadata"]["resourceVersion"] != before)
    assert not all(written)


def test_numbers_are_mirrored_at_most_every_ten_seconds(live_training: LiveTraining):
    live_training.apply()
    settle(live_training)
    assert live_training.status["progress"]["update"] == 1, "the first numbers are mirrored immediately"
    mirrored = {1}
    first = live_training.plane.monotonic()
    update = 1
    while len(mirrored) < 3:
        update += 1
        live_training.report(update=update, version=update)
        mirrored.add(live_training.status["progress"]["update"])
        assert live_training.plane.monotonic() - first < PATIENCE, "newer numbers never came"
        live_training.plane.wait(0.2)
    # Between two copies of numbers that came after `first`. Their times are whole seconds, rounded down.
    assert live_training.plane.monotonic() - first > MIN_PROGRESS_SECONDS - 1
    live_training.until(lambda: live_training.status["progress"]["update"] == update, "the newest come in the end")


@pytest.mark.worlds("memory", "real")
def test_children_go_with_the_training(live_training: LiveTraining):
    live_training.apply()
    live_training.until_pods("rollout", 2)
    live_training.delete()
    kinds = (*CHILDREN, "rayclusters", "pods")
    live_training.until(lambda: not any(live_training.mine(kind) for kind in kinds), "all children are gone")


def test_a_training_deleted_while_it_is_created_leaves_nothing(live_training: LiveTraining):
    for _ in range(5):
        live_training.apply()
        live_training.delete()
    live_training.until(lambda: live_training.find("qwen35trainings", live_training.name) is None, "it is gone")
    kinds = (*CHILDREN, "rayclusters", "pods")
    live_training.until(lambda: not any(live_training.mine(kind) for kind in kinds), "all children are gone")


def test_a_training_that_is_created_again_starts_from_the_first_attempt(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    before = live_training.body["metadata"]["uid"]
    live_training.delete()
    live_training.apply()
    uid = live_training.body["metadata"]["uid"]
    assert uid != before

    def own() -> bool:
        job = live_training.job()
        return job is not None and job["metadata"]["ownerReferences"][0]["uid"] == uid

    live_training.until(own, "the new training has a job of its own")
    live_training.until(
        lambda: [item["number"] for item in live_training.attempts] == [1], "its first attempt is counted as the first"
    )


def test_the_children_go_when_their_time_to_live_is_over(live_training: LiveTraining):
    live_training.apply(cleanupSecondsAfterFinished=2)
    live_training.until_job()
    live_training.report("Succeeded", message="enough")
    live_training.until_state("Succeeded")
    kinds = (*CHILDREN, "rayclusters", "pods")
    live_training.until(lambda: not any(live_training.mine(kind) for kind in kinds), "all children are gone")
    assert live_training.state == "Succeeded"
    assert live_training.condition("Succeeded")[0] == "True"


def test_a_training_that_is_over_is_not_started_again(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    live_training.report("Succeeded", message="enough")
    live_training.until_state("Succeeded")
    live_training.edit(rollout={"nodes": 3})
    live_training.until(
        lambda: live_training.status["observedGeneration"] == live_training.body["metadata"]["generation"],
        "the edit is seen",
    )
    assert [item["outcome"] for item in live_training.attempts] == ["Succeeded"]
    assert live_training.job(2) is None


def test_a_deadline_ends_it(live_training: LiveTraining):
    live_training.apply(activeDeadlineSeconds=3, checkpoint={"graceSeconds": 1})
    live_training.until_job()
    live_training.report()
    live_training.until_condition("Failed", "True", "DeadlineExceeded")
    assert live_training.attempts[-1]["reason"] == "DeadlineExceeded"


def test_the_operators_metrics_know_its_trainings(live_training: LiveTraining, operator: OperatorProcess):
    live_training.apply()
    live_training.until_job()
    live_training.report()
    live_training.until_state("Running")
    # The status is written a moment before its writer counts it.
    live_training.until(lambda: operator.metrics().get('qwen35_trainings{state="Running"}', 0) >= 1, "it is counted")
    metrics = operator.metrics()
    assert metrics["qwen35_leading"] == 1
    assert metrics['qwen35_reconciles_total{result="done"}'] >= 1
