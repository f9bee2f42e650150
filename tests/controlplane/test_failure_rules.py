"""Why attempts fail, and what follows: every rule, as far as objects of a real cluster can show it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.controlplane.cases import first_on_both
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.story_place import StoryPlace

pytestmark = pytest.mark.worlds("memory")

LOST = ("WorkerLost", "rank 3 is gone: NCCL watchdog timeout")


def fail(live_training: LiveTraining, reason: str = LOST[0], message: str = LOST[1], **fields: Any) -> dict[str, Any]:
    """The trainer says so. Returns how the attempt was recorded."""
    live_training.report("Failed", reason=reason, message=message, **fields)
    return ended(live_training)


def ended(live_training: LiveTraining) -> dict[str, Any]:
    live_training.until(lambda: live_training.first.get("outcome", "Running") != "Running", "attempt 1 is recorded")
    return live_training.first


def end(live_training: LiveTraining, pod: str, reason: str, exit_code: int) -> None:
    """A container ends; KubeRay deletes its pod immediately, and the pod's last state contains the reason."""
    with live_training.plane.kubelets_away():
        live_training.spoil(pod, reason, exit_code=exit_code)
        live_training.until(lambda: live_training.first.get("fault"), "the fault is recorded")


def policy(*rules: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Long enough a backoff to look at it."""
    return {"maxRestarts": 3, "backoffSeconds": 600, "rules": list(rules)} | fields


def test_the_trainers_word_on_bad_input_is_final(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    fail(live_training, "DataError", "data/train.jsonl:3: no field prompt. Add one.")
    live_training.until_condition("Failed", "True", "FailedByRule")
    assert live_training.condition("Stalled") == ("True", "FailedByRule")
    assert (
        "data/train.jsonl:3: no field prompt. Add one. (rule not-retryable)"
        in live_training.whole_condition("Failed")["message"]
    )
    assert live_training.restarts == 0


def test_anything_else_is_tried_again(live_training: LiveTraining):
    live_training.apply(failurePolicy=policy())
    live_training.until_job()
    attempt = fail(live_training)
    assert (attempt["reason"], attempt["message"], attempt["counted"]) == (*LOST, True)
    live_training.until_condition("Reconciling", "True", "Backoff")
    assert (live_training.state, live_training.restarts) == ("Restarting", 1)
    live_training.until(lambda: live_training.announced("AttemptFailed"), "an event says so")


def test_no_restarts_are_left_in_the_end(live_training: LiveTraining):
    live_training.apply(failurePolicy=policy(maxRestarts=0))
    live_training.until_job()
    fail(live_training)
    live_training.until_condition("Failed", "True", "RestartsExhausted")
    assert LOST[1] in live_training.whole_condition("Failed")["message"]
    assert live_training.restarts == 0


@pytest.mark.parametrize(
    ("pool", "update", "state"),
    first_on_both([("train", 0, "Failed"), ("train", 5, "Restarting"), ("rollout", 0, "Restarting")]),
)
def test_out_of_memory_at_the_start_would_happen_again(live_training: LiveTraining, pool: str, update: int, state: str):
    live_training.apply(failurePolicy=policy())
    pods = live_training.until_pods(pool, {"train": 1, "rollout": 2}[pool])
    live_training.report(update=update, version=update)
    end(live_training, pods[0], "OOMKilled", 137)
    attempt = fail(live_training, update=update)
    live_training.until_state(state)
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
        assert live_training.condition("Failed") == ("True", "FailedByRule")


def preempt(live_training: LiveTraining, pod: str) -> None:
    live_training.spoil(pod, condition="PreemptionByScheduler")


def evict(live_training: LiveTraining, pod: str) -> None:
    live_training.plane.api.post(f"{live_training.path('pods', pod)}/eviction", {"metadata": {"name": pod}})


@pytest.mark.parametrize(("take", "reason"), first_on_both([(evict, "Evicted"), (preempt, "Preempted")]))
def test_what_the_cluster_takes_away_does_not_count(
    live_training: LiveTraining, take: Callable[[LiveTraining, str], None], reason: str
):
    live_training.apply(failurePolicy=policy(maxRestarts=0))
    (pod,) = live_training.until_pods("train", 1)
    live_training.report()
    with live_training.plane.kubelets_away():
        take(live_training, pod)
        live_training.until(
            lambda: live_training.first.get("fault", {}).get("reason") == reason, "the fault is recorded"
        )
    attempt = fail(live_training)
    assert (attempt["reason"], attempt["counted"]) == (reason, False)
    live_training.until_condition("Reconciling", "True", "Backoff")
    assert live_training.restarts == 0


@pytest.mark.parametrize(
    ("rule", "pool"),
    [
        ({"action": "Fail", "onPool": "train", "onExitCodes": [134, 139]}, "train"),
        ({"action": "Fail", "onPool": "rollout"}, "rollout"),
        ({"action": "Fail", "onReasons": ["WorkerLost"]}, "train"),
        ({"action": "Fail", "onMessagePattern": r"NCCL .* timeout"}, "train"),
    ],
    ids=["pool and exit code", "pool", "reason", "message"],
)
def test_a_rule_of_the_user_decides_first(live_training: LiveTraining, rule: dict[str, Any], pool: str):
    other = {"name": "other", "action": "RestartAndIgnoreMaxRestarts", "onReasons": ["Nothing"]}
    live_training.apply(failurePolicy=policy(other, {"name": "mine"} | rule))
    pods = live_training.until_pods(pool, {"train": 1, "rollout": 2}[pool])
    live_training.report()
    end(live_training, pods[0], "Error", 139)
    fail(live_training)
    live_training.until_condition("Failed", "True", "FailedByRule")
    assert "(rule mine)" in live_training.whole_condition("Failed")["message"]


def test_a_rule_that_does_not_match_decides_nothing(live_training: LiveTraining):
    rule = {"name": "mine", "action": "Fail", "onPool": "train", "onExitCodes": [139]}
    live_training.apply(failurePolicy=policy(rule))
    pods = live_training.until_pods("rollout", 2)
    live_training.report()
    end(live_training, pods[0], "Error", 139)
    fail(live_training)
    live_training.until_condition("Reconciling", "True", "Backoff")


def test_a_user_may_restart_what_would_be_final(live_training: LiveTraining):
    rule = {"name": "flaky-store", "action": "RestartAndIgnoreMaxRestarts", "onReasons": ["DataError"]}
    live_training.apply(failurePolicy=policy(rule, maxRestarts=0))
    live_training.until_job()
    attempt = fail(live_training, "DataError", "the object store did not answer")
    assert attempt["counted"] is False
    live_training.until_condition("Reconciling", "True", "Backoff")


def test_a_run_without_new_versions_has_stalled(live_training: LiveTraining):
    live_training.apply(failurePolicy=policy(stallFactor=2))
    live_training.until_pods("head", 1)
    last = live_training.plane.now() - 61

    def stalled() -> bool:
        # At least a minute is given: the driver keeps reporting that its latest version is older.
        live_training.report(versionTime=last, versionSeconds=1.0)
        return live_training.first.get("outcome") == "Failed"

    live_training.until(stalled, "the attempt has failed")
    attempt = live_training.attempts[0]
    assert (attempt["reason"], attempt["counted"]) == ("Stalled", True)
    assert "more than 60 s is a stall" in attempt["message"]


def test_an_update_may_take_long_where_updates_do(live_training: LiveTraining):
    live_training.apply(failurePolicy=policy(stallFactor=20))
    live_training.until_pods("head", 1)
    last = live_training.plane.now() - 500
    update = 1

    def looked() -> bool:
        nonlocal update
        # Reports of the second in which the head was made do not count: each is a new one.
        update += 1
        live_training.report(update=update, versionTime=last, versionSeconds=30.0)
        return bool(live_training.status.get("progress", {}).get("update", 0) > 2)

    live_training.until(looked, "the operator has looked at a report of which it knows the age")
    assert (live_training.state, live_training.attempts[0]["outcome"]) == ("Running", "Running")

    def stalled() -> bool:
        live_training.report(update=update, versionTime=last, versionSeconds=1.0)
        return live_training.first.get("outcome") == "Failed"

    live_training.until(stalled, "the same age is a stall where updates take a second")
    assert live_training.first["reason"] == "Stalled"


def test_a_job_deleted_by_somebody_is_a_failed_attempt(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    live_training.plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    attempt = ended(live_training)
    assert (attempt["reason"], attempt["counted"]) == ("JobDeleted", True)
    live_training.until_job(2)


def test_a_lost_rollout_pod_is_reported_and_survived(live_training: LiveTraining):
    live_training.apply()
    pods = live_training.until_pods("rollout", 2)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    with live_training.plane.kubelets_away():
        live_training.spoil(pods[0], "Error", exit_code=1)
        live_training.until_condition("Degraded", "True", "PodFault")
        assert live_training.condition("Ready") == ("True", "Running")
        assert live_training.condition("RolloutReady") == ("True", "NodesReady")
    live_training.until(lambda: pods[0] not in live_training.pods("rollout"), "KubeRay deletes it")
    live_training.until_pods("rollout", 2)
    live_training.until_condition("Degraded", "False", "AsExpected")
    fault = live_training.attempts[0]["fault"]
    assert (fault["pod"], fault["reason"], fault["exitCode"]) == (pods[0], "Error", 1)


def test_a_lost_train_pod_is_no_longer_ready(live_training: LiveTraining):
    live_training.apply()
    (pod,) = live_training.until_pods("train", 1)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    live_training.spoil(pod, condition="PreemptionByScheduler")
    live_training.until_condition("TrainReady", "False", "NodesMissing")
    assert live_training.condition("Ready")[0] == "False"
    assert live_training.condition("Reconciling")[0] == "True"


def test_the_last_report_of_an_earlier_attempt_changes_nothing(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    live_training.plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    live_training.until_job(2)
    live_training.report("Succeeded", attempt=1, message="too late")
    live_training.write("garbage")
    live_training.until_condition("Degraded", "True", "ProgressUnreadable")
    live_training.report(attempt=2)
    live_training.until_state("Running")
    assert [item["outcome"] for item in live_training.attempts] == ["Failed", "Running"]


@pytest.fixture
def dying_node(world: StoryPlace) -> Iterator[str]:
    """A node that only this test uses."""
    name = "dying-0"
    body = {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": "dying", "effect": "NoSchedule"}]},
        "status": {"allocatable": {"cpu": "100", "memory": "1000Gi", "pods": "10"}},
    }
    body["status"]["capacity"] = body["status"]["allocatable"]
    world.plane.api.post("/api/v1/nodes", body)
    yield name
    world.plane.api.request("DELETE", f"/api/v1/nodes/{name}")


@pytest.mark.worlds("memory", "real")
def test_a_lost_node_is_the_reason(live_training: LiveTraining, dying_node: str):
    there = {"nodeSelector": {"kubernetes.io/hostname": dying_node}, "tolerations": [{"key": "dying"}]}
    live_training.apply(failurePolicy=policy(), pods={"train": {"spec": there}})
    (pod,) = live_training.until_pods("train", 1)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    with live_training.plane.kubelets_away():
        taints = [{"key": "dying", "effect": "NoSchedule"}, {"key": "dead", "effect": "NoExecute"}]
        live_training.patch(f"/api/v1/nodes/{dying_node}", {"spec": {"taints": taints}})
        live_training.until(lambda: live_training.first.get("fault"), "the fault is recorded")
        fault = live_training.attempts[0]["fault"]
        assert (fault["pod"], fault["reason"]) == (pod, "NodeLost")
        attempt = fail(live_training)
    assert (attempt["reason"], attempt["counted"]) == ("NodeLost", True)
    live_training.until_condition("Reconciling", "True", "Backoff")


def test_a_pod_that_does_not_end_holds_up_the_next_attempt(live_training: LiveTraining):
    live_training.apply()
    live_training.until_pods("train", 1)
    cluster = live_training.cluster()
    assert cluster is not None
    own = {"apiVersion": cluster["apiVersion"], "kind": cluster["kind"], "controller": True}
    own |= {"name": cluster["metadata"]["name"], "uid": cluster["metadata"]["uid"]}
    # It was never given to a node, so nobody ends it.
    labels = {"rl.qwen35.io/training": "demo", "rl.qwen35.io/attempt": "1", "rl.qwen35.io/pool": "train"}
    metadata = {"name": "stuck", "labels": labels, "finalizers": ["test.qwen35.io/stuck"], "ownerReferences": [own]}
    pod = {
        "metadata": metadata,
        "spec": {"nodeSelector": {"is": "nowhere"}, "containers": [{"name": "ray", "image": "ray"}]},
    }
    live_training.plane.api.post(live_training.path("pods", None), pod)
    live_training.plane.api.request("DELETE", live_training.path("pods", "stuck"))
    live_training.plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    try:
        live_training.until_condition("Reconciling", "True", "Cleaning")
        # Of many leftovers it names some.
        live_training.until(
            lambda: "pod stuck" in live_training.whole_condition("Reconciling").get("message", ""), "the pod is named"
        )
        assert live_training.job(2) is None
    finally:
        live_training.patch(live_training.path("pods", "stuck"), {"metadata": {"finalizers": None}})
    live_training.until_job(2)


@pytest.mark.worlds("memory", "real")
def test_a_job_fails_is_ordered_to_fail_and_succeeds(live_training: LiveTraining, ray_jobs: None):
    live_training.apply(
        script=[
            [{"publish": 1}, {"exit": 3}],
            [{"publish": 1}, {"fail": list(LOST)}],
            [{"publish": 1}, "terminate"],
            [{"publish": 1}, {"exit": 0}],
            [{"publish": 1}, {"succeed": "at last"}],
        ],
        failurePolicy={"maxRestarts": 4, "backoffSeconds": 0.1},
    )
    live_training.until_state("Succeeded")
    assert [(item["outcome"], item.get("reason")) for item in live_training.attempts] == [
        ("Failed", "AppFailed"),
        ("Failed", "WorkerLost"),
        ("Failed", "Interrupted"),
        ("Failed", "NoFinalState"),
        ("Succeeded", "Succeeded"),
    ]
    assert "exit code 3" in live_training.attempts[0]["message"].lower().replace("exit status", "exit code")
    assert live_training.restarts == 4
