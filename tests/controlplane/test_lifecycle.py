"""A training from apply to the end: what it makes, what it says, what it leaves."""

import time
from pathlib import Path

import pytest

from qwen35_operator.reconcile.report import MIRROR
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story import CHILDREN, Story
from tests.patience import PATIENCE
from tests.testbed.ray_head import RayHead

TERMINAL = 80
POOLS = {"head": 1, "rollout": 2, "train": 1}


def settle(story: Story) -> None:
    """It trains on all nodes, and the status says so: from here on only what is reported is news."""
    for pool, nodes in POOLS.items():
        story.until_pods(pool, nodes)
    story.report()
    story.until_condition("Ready", "True", "Running")
    story.until(lambda: {one["name"]: one["ready"] for one in story.status["pools"]} == POOLS, "all nodes are ready")


def test_a_training_runs_from_accepted_to_succeeded(story: Story, ray_head: RayHead, tmp_path: Path):
    seen = tmp_path / "seen"
    begin, end = (
        [{"report": {"updates": 6}}, {"await": str(seen)}],
        [{"report": {"update": 6}}, {"succeed": "all done"}],
    )
    story.apply(script=[[*begin, {"publish": 5}, *end]])
    story.until_condition("Accepted", "True", "Accepted")
    story.until_condition("ClusterReady", "True", "NodesReady")
    story.until_condition("RolloutReady", "True", "NodesReady")
    story.until(lambda: story.status.get("progress", {}).get("updates") == 6, "progress is mirrored")
    seen.touch()
    story.until_state("Succeeded")

    status = story.status
    assert status["progress"]["update"] == 6
    assert status["lastCheckpoint"]["update"] == 6
    assert status["observedGeneration"] == story.body["metadata"]["generation"]
    (attempt,) = status["attempts"]
    assert (attempt["outcome"], attempt["message"]) == ("Succeeded", "attempt 1: all done")
    assert story.condition("Succeeded") == story.condition("Ready") == ("True", "Succeeded")
    assert {story.condition(kind)[0] for kind in ("Reconciling", "Stalled", "Failed", "Degraded")} == {"False"}
    story.until(lambda: story.announced("AttemptStarted") and story.announced("Succeeded"), "events tell the story")

    # The job's own end is real: Ray has run it, and KubeRay has seen that.
    story.until(lambda: story.job_state() == "Complete", "KubeRay completes the job")
    job = story.job()
    assert job is not None
    assert job["status"]["jobStatus"] == "SUCCEEDED"
    story.until(lambda: not story.mine("pods"), "the pods are gone")


def test_the_columns_fit_a_terminal(story: Story):
    story.apply()
    story.until_job()
    story.report(update=123456, version=123456, reward=0.987654321, lagMean=1.25)
    story.until_state("Running")
    lines = story.kubectl("get", "q35").splitlines()
    assert lines[0].split() == ["NAME", "MODE", "STATE", "UPDATE", "VERSION", "REWARD", "ROLLOUT", "AGE"]
    assert lines[1].split()[:5] == ["demo", "FullyAsync", "Running", "123456", "123456"]
    # A name of twelve letters in the place of "demo".
    assert max(len(line) for line in lines) + len("qwen35-0.8b-") - len("demo") <= TERMINAL


def test_kubectl_waits_for_conditions(story: Story):
    story.apply()
    story.until_job()
    story.report("Succeeded", message="enough")
    story.kubectl("wait", "q35/demo", "--for=condition=Succeeded", f"--timeout={PATIENCE:.0f}s")


def looks(operator: OperatorProcess) -> float:
    """Reconciles that are done, and came to an end."""
    return operator.metrics()['qwen35_reconciles_total{result="done"}']


def test_an_idle_training_is_not_written_to(story: Story, operator: OperatorProcess):
    story.apply()
    settle(story)
    # Late events of KubeRay and the pods may still be written in a first round; heartbeats and their times never are.
    written = []
    for _ in range(3):
        before = story.body["metadata"]["resourceVersion"]
        for _ in range(4):
            looked = looks(operator)
            story.report()
            story.until(lambda looked=looked: looks(operator) > looked, "the operator has looked at the report")
        written.append(story.body["metadata"]["resourceVersion"] != before)
    assert not all(written)


@pytest.mark.quiet
def test_numbers_are_mirrored_at_most_every_ten_seconds(story: Story):
    story.apply()
    settle(story)
    assert story.status["progress"]["update"] == 1, "the first are mirrored at once"
    mirrored = {1}
    first = time.monotonic()
    update = 1
    while len(mirrored) < 3:
        update += 1
        story.report(update=update, version=update)
        mirrored.add(story.status["progress"]["update"])
        assert time.monotonic() - first < PATIENCE, "newer numbers never came"
        time.sleep(0.2)
    # Between two copies of numbers that came after `first`. Their times are whole seconds, rounded down.
    assert time.monotonic() - first > MIRROR - 1
    story.until(lambda: story.status["progress"]["update"] == update, "the newest come in the end")


def test_children_go_with_the_training(story: Story):
    story.apply()
    story.until_pods("rollout", 2)
    story.delete()
    kinds = (*CHILDREN, "rayclusters", "pods")
    story.until(lambda: not any(story.mine(kind) for kind in kinds), "all children are gone")


def test_a_training_deleted_while_it_is_created_leaves_nothing(story: Story):
    for _ in range(5):
        story.apply()
        story.delete()
    story.until(lambda: story.find("qwen35trainings", story.name) is None, "it is gone")
    kinds = (*CHILDREN, "rayclusters", "pods")
    story.until(lambda: not any(story.mine(kind) for kind in kinds), "all children are gone")


def test_a_training_made_anew_starts_from_the_first_attempt(story: Story):
    story.apply()
    story.until_job()
    before = story.body["metadata"]["uid"]
    story.delete()
    story.apply()
    uid = story.body["metadata"]["uid"]
    assert uid != before

    def own() -> bool:
        job = story.job()
        return job is not None and job["metadata"]["ownerReferences"][0]["uid"] == uid

    story.until(own, "the new training has a job of its own")
    story.until(lambda: [one["number"] for one in story.attempts] == [1], "its first attempt is counted as the first")


def test_the_children_go_when_their_time_to_live_is_over(story: Story):
    story.apply(ttlSecondsAfterFinished=2)
    story.until_job()
    story.report("Succeeded", message="enough")
    story.until_state("Succeeded")
    kinds = (*CHILDREN, "rayclusters", "pods")
    story.until(lambda: not any(story.mine(kind) for kind in kinds), "all children are gone")
    assert story.state == "Succeeded"
    assert story.condition("Succeeded")[0] == "True"


def test_a_training_that_is_over_is_not_started_again(story: Story):
    story.apply()
    story.until_job()
    story.report("Succeeded", message="enough")
    story.until_state("Succeeded")
    story.edit(rollout={"nodes": 3})
    story.until(lambda: story.status["observedGeneration"] == story.body["metadata"]["generation"], "the edit is seen")
    assert [one["outcome"] for one in story.attempts] == ["Succeeded"]
    assert story.job(2) is None


def test_a_deadline_ends_it(story: Story):
    story.apply(activeDeadlineSeconds=3, checkpoint={"graceSeconds": 1})
    story.until_job()
    story.report()
    story.until_condition("Failed", "True", "DeadlineExceeded")
    assert story.attempts[-1]["reason"] == "DeadlineExceeded"


def test_the_operators_metrics_know_its_trainings(story: Story, operator: OperatorProcess):
    story.apply()
    story.until_job()
    story.report()
    story.until_state("Running")
    # The status is written a moment before its writer counts it.
    story.until(lambda: operator.metrics().get('qwen35_trainings{state="Running"}', 0) >= 1, "it is counted")
    metrics = operator.metrics()
    assert metrics["qwen35_leading"] == 1
    assert metrics['qwen35_reconciles_total{result="done"}'] >= 1
