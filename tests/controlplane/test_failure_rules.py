"""Why attempts fail, and what follows: every rule, as far as objects of a real cluster can show it."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.controlplane.cases import first_real
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story import Story
from tests.testbed.control_plane import ControlPlane
from tests.testbed.ray_head import RayHead

LOST = ("WorkerLost", "rank 3 is gone: NCCL watchdog timeout")


def fail(story: Story, reason: str = LOST[0], message: str = LOST[1], **fields: Any) -> dict[str, Any]:
    """The trainer says so. Returns how the attempt was recorded."""
    story.report("Failed", reason=reason, message=message, **fields)
    return ended(story)


def ended(story: Story) -> dict[str, Any]:
    story.until(lambda: story.first.get("outcome", "Running") != "Running", "attempt 1 is recorded")
    return story.first


def end(story: Story, pod: str, reason: str, exit_code: int) -> None:
    """A container ends; KubeRay deletes its pod at once, whose last state tells why."""
    with story.kubelets_away():
        story.spoil(pod, reason, exit_code=exit_code)
        story.until(lambda: story.first.get("fault"), "the fault is recorded")


def policy(*rules: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Long enough a backoff to look at it."""
    return {"maxRestarts": 3, "backoffSeconds": 600, "rules": list(rules)} | fields


def test_the_trainers_word_on_bad_input_is_final(story: Story):
    story.apply()
    story.until_job()
    fail(story, "DataError", "data/train.jsonl:3: no field prompt. Add one.")
    story.until_condition("Failed", "True", "FailedByRule")
    assert story.condition("Stalled") == ("True", "FailedByRule")
    assert "data/train.jsonl:3: no field prompt. Add one. (rule refused-input)" in story.told("Failed")["message"]
    assert story.restarts == 0


def test_anything_else_is_tried_again(story: Story):
    story.apply(failurePolicy=policy())
    story.until_job()
    attempt = fail(story)
    assert (attempt["reason"], attempt["message"], attempt["counted"]) == (*LOST, True)
    story.until_condition("Reconciling", "True", "Backoff")
    assert (story.state, story.restarts) == ("Restarting", 1)
    story.until(lambda: story.announced("AttemptFailed"), "an event says so")


def test_no_restarts_are_left_in_the_end(story: Story):
    story.apply(failurePolicy=policy(maxRestarts=0))
    story.until_job()
    fail(story)
    story.until_condition("Failed", "True", "RestartsExhausted")
    assert LOST[1] in story.told("Failed")["message"]
    assert story.restarts == 0


@pytest.mark.parametrize(
    ("pool", "update", "state"),
    first_real([("train", 0, "Failed"), ("train", 5, "Restarting"), ("rollout", 0, "Restarting")]),
)
def test_out_of_memory_at_the_start_would_happen_again(story: Story, pool: str, update: int, state: str):
    story.apply(failurePolicy=policy())
    pods = story.until_pods(pool, {"train": 1, "rollout": 2}[pool])
    story.report(update=update, version=update)
    end(story, pods[0], "OOMKilled", 137)
    attempt = fail(story, update=update)
    story.until_state(state)
    assert attempt["fault"] | {"time": None} == {
        "pool": pool,
        "pod": pods[0],
        "reason": "OOMKilled",
        "exitCode": 137,
        "message": attempt["fault"]["message"],
        "time": None,
    }
    if pool == "train" and not update:
        assert attempt["reason"] == "OOMKilled"
        assert story.condition("Failed") == ("True", "FailedByRule")


def preempt(story: Story, pod: str) -> None:
    story.spoil(pod, condition="PreemptionByScheduler")


def evict(story: Story, pod: str) -> None:
    story.plane.api.post(f"{story.path('pods', pod)}/eviction", {"metadata": {"name": pod}})


@pytest.mark.parametrize(("take", "reason"), first_real([(evict, "Evicted"), (preempt, "Preempted")]))
def test_what_the_cluster_takes_away_does_not_count(story: Story, take: Callable[[Story, str], None], reason: str):
    story.apply(failurePolicy=policy(maxRestarts=0))
    (pod,) = story.until_pods("train", 1)
    story.report()
    with story.kubelets_away():
        take(story, pod)
        story.until(lambda: story.first.get("fault", {}).get("reason") == reason, "the fault is recorded")
    attempt = fail(story)
    assert (attempt["reason"], attempt["counted"]) == (reason, False)
    story.until_condition("Reconciling", "True", "Backoff")
    assert story.restarts == 0


@pytest.mark.parametrize(
    ("rule", "pool"),
    first_real(
        [
            ({"action": "Fail", "pool": "train", "exitCodes": [134, 139]}, "train"),
            ({"action": "Fail", "pool": "rollout"}, "rollout"),
            ({"action": "Fail", "reasons": ["WorkerLost"]}, "train"),
            ({"action": "Fail", "messagePattern": r"NCCL .* timeout"}, "train"),
        ]
    ),
    ids=["pool and exit code", "pool", "reason", "message"],
)
def test_a_rule_of_the_user_decides_first(story: Story, rule: dict[str, Any], pool: str):
    other = {"name": "other", "action": "RestartWithoutCounting", "reasons": ["Nothing"]}
    story.apply(failurePolicy=policy(other, {"name": "mine"} | rule))
    pods = story.until_pods(pool, {"train": 1, "rollout": 2}[pool])
    story.report()
    end(story, pods[0], "Error", 139)
    fail(story)
    story.until_condition("Failed", "True", "FailedByRule")
    assert "(rule mine)" in story.told("Failed")["message"]


@pytest.mark.soak
def test_a_rule_that_does_not_match_decides_nothing(story: Story):
    rule = {"name": "mine", "action": "Fail", "pool": "train", "exitCodes": [139]}
    story.apply(failurePolicy=policy(rule))
    pods = story.until_pods("rollout", 2)
    story.report()
    end(story, pods[0], "Error", 139)
    fail(story)
    story.until_condition("Reconciling", "True", "Backoff")


@pytest.mark.soak
def test_a_user_may_restart_what_would_be_final(story: Story):
    rule = {"name": "flaky-store", "action": "RestartWithoutCounting", "reasons": ["DataError"]}
    story.apply(failurePolicy=policy(rule, maxRestarts=0))
    story.until_job()
    attempt = fail(story, "DataError", "the object store did not answer")
    assert attempt["counted"] is False
    story.until_condition("Reconciling", "True", "Backoff")


def test_a_run_without_new_versions_has_stalled(story: Story):
    story.apply(failurePolicy=policy(stallFactor=2))
    story.until_pods("head", 1)
    last = time.time() - 61

    def stalled() -> bool:
        # At least a minute is given: the driver goes on saying that its latest version is older.
        story.report(versionTime=last, versionSeconds=1.0)
        return story.first.get("outcome") == "Failed"

    story.until(stalled, "the attempt has failed")
    attempt = story.attempts[0]
    assert (attempt["reason"], attempt["counted"]) == ("Stalled", True)
    assert "more than 60 s is a stall" in attempt["message"]


def test_an_update_may_take_long_where_updates_do(story: Story):
    story.apply(failurePolicy=policy(stallFactor=20))
    story.until_pods("head", 1)
    last = time.time() - 500
    update = 1

    def looked() -> bool:
        nonlocal update
        # Reports of the second in which the head was made do not count: each is a new one.
        update += 1
        story.report(update=update, versionTime=last, versionSeconds=30.0)
        return bool(story.status.get("progress", {}).get("update", 0) > 2)

    story.until(looked, "the operator has looked at a report of which it knows the age")
    assert (story.state, story.attempts[0]["outcome"]) == ("Running", "Running")

    def stalled() -> bool:
        story.report(update=update, versionTime=last, versionSeconds=1.0)
        return story.first.get("outcome") == "Failed"

    story.until(stalled, "the same age is a stall where updates take a second")
    assert story.first["reason"] == "Stalled"


def test_a_job_deleted_by_somebody_is_a_failed_attempt(story: Story):
    story.apply()
    story.until_job()
    story.plane.api.request("DELETE", story.path("rayjobs", "demo-1"))
    attempt = ended(story)
    assert (attempt["reason"], attempt["counted"]) == ("JobDeleted", True)
    story.until_job(2)


def test_a_lost_rollout_pod_is_told_and_survived(story: Story):
    story.apply()
    pods = story.until_pods("rollout", 2)
    story.report()
    story.until_condition("Ready", "True", "Running")
    with story.kubelets_away():
        story.spoil(pods[0], "Error", exit_code=1)
        story.until_condition("Degraded", "True", "PodFault")
        assert story.condition("Ready") == ("True", "Running")
        assert story.condition("RolloutReady") == ("True", "NodesReady")
    story.until(lambda: pods[0] not in story.pods("rollout"), "KubeRay deletes it")
    story.until_pods("rollout", 2)
    story.until_condition("Degraded", "False", "AsExpected")
    fault = story.attempts[0]["fault"]
    assert (fault["pod"], fault["reason"], fault["exitCode"]) == (pods[0], "Error", 1)


def test_a_lost_train_pod_is_no_longer_ready(story: Story):
    story.apply()
    (pod,) = story.until_pods("train", 1)
    story.report()
    story.until_condition("Ready", "True", "Running")
    story.spoil(pod, condition="PreemptionByScheduler")
    story.until_condition("TrainReady", "False", "NodesMissing")
    assert story.condition("Ready")[0] == "False"
    assert story.condition("Reconciling")[0] == "True"


def test_an_earlier_attempts_last_words_are_no_news(story: Story):
    story.apply()
    story.until_job()
    story.plane.api.request("DELETE", story.path("rayjobs", "demo-1"))
    story.until_job(2)
    story.report("Succeeded", attempt=1, message="too late")
    story.write("garbage")
    story.until_condition("Degraded", "True", "ProgressUnreadable")
    story.report(attempt=2)
    story.until_state("Running")
    assert [one["outcome"] for one in story.attempts] == ["Failed", "Running"]


@pytest.fixture
def dying_node(control_plane: ControlPlane) -> Iterator[str]:
    """A node of the test's own."""
    name = "dying-0"
    body = {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": "dying", "effect": "NoSchedule"}]},
        "status": {"allocatable": {"cpu": "100", "memory": "1000Gi", "pods": "10"}},
    }
    body["status"]["capacity"] = body["status"]["allocatable"]
    control_plane.api.post("/api/v1/nodes", body)
    yield name
    control_plane.api.request("DELETE", f"/api/v1/nodes/{name}")


def test_a_lost_node_is_the_reason(story: Story, dying_node: str):
    there = {"nodeSelector": {"kubernetes.io/hostname": dying_node}, "tolerations": [{"key": "dying"}]}
    story.apply(failurePolicy=policy(), pods={"train": {"spec": there}})
    (pod,) = story.until_pods("train", 1)
    story.report()
    story.until_condition("Ready", "True", "Running")
    with story.kubelets_away():
        taints = [{"key": "dying", "effect": "NoSchedule"}, {"key": "dead", "effect": "NoExecute"}]
        story.patch(f"/api/v1/nodes/{dying_node}", {"spec": {"taints": taints}})
        story.until(lambda: story.first.get("fault"), "the fault is recorded")
        fault = story.attempts[0]["fault"]
        assert (fault["pod"], fault["reason"]) == (pod, "NodeLost")
        attempt = fail(story)
    assert (attempt["reason"], attempt["counted"]) == ("NodeLost", True)
    story.until_condition("Reconciling", "True", "Backoff")


def test_a_pod_that_does_not_end_holds_up_the_next_attempt(story: Story):
    story.apply()
    story.until_job()
    # It was never given to a node, so nobody ends it.
    labels = {"rl.qwen35.io/training": "demo", "rl.qwen35.io/attempt": "1", "rl.qwen35.io/pool": "train"}
    pod = {
        "metadata": {"name": "stuck", "labels": labels, "finalizers": ["test.qwen35.io/stuck"]},
        "spec": {"nodeSelector": {"is": "nowhere"}, "containers": [{"name": "ray", "image": "ray"}]},
    }
    story.plane.api.post(story.path("pods", None), pod)
    story.plane.api.request("DELETE", story.path("pods", "stuck"))
    story.plane.api.request("DELETE", story.path("rayjobs", "demo-1"))
    try:
        story.until_condition("Reconciling", "True", "Cleaning")
        # Of many leftovers it names some.
        story.until(lambda: "pod stuck" in story.told("Reconciling").get("message", ""), "the pod is named")
        assert story.job(2) is None
    finally:
        story.patch(story.path("pods", "stuck"), {"metadata": {"finalizers": None}})
    story.until_job(2)


def test_a_real_job_fails_is_told_to_fail_and_succeeds(story: Story, ray_head: RayHead, operator: OperatorProcess):
    story.apply(
        script=[
            [{"publish": 1}, {"exit": 3}],
            [{"publish": 1}, {"fail": list(LOST)}],
            [{"publish": 1}, "terminate"],
            [{"publish": 1}, {"exit": 0}],
            [{"publish": 1}, {"succeed": "at last"}],
        ],
        failurePolicy={"maxRestarts": 4, "backoffSeconds": 0.1},
    )
    story.until_state("Succeeded")
    assert [(one["outcome"], one.get("reason")) for one in story.attempts] == [
        ("Failed", "AppFailed"),
        ("Failed", "WorkerLost"),
        ("Failed", "Interrupted"),
        ("Failed", "NoFinalState"),
        ("Succeeded", "Succeeded"),
    ]
    assert "exit code 3" in story.attempts[0]["message"].lower().replace("exit status", "exit code")
    assert story.restarts == 4
