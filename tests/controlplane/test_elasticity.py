"""The rollout pool grows and shrinks while it runs, and only where the size is ours to decide."""

from typing import Any

import pytest

from tests.controlplane.live_training import LiveTraining

pytestmark = pytest.mark.worlds("memory")

QUEUE = {"kueue.x-k8s.io/queue-name": "rl"}
EAGER = {"autoscale": {"stabilizationSeconds": 1, "growAboveTrainIdle": 0.3, "shrinkAboveRolloutIdle": 0.5}}


def running(live_training: LiveTraining, labels: dict[str, str] | None = None, **rollout: Any) -> list[str]:
    """Names of the rollout pods of a training that runs."""
    live_training.apply(labels=labels, rollout=rollout)
    pods = live_training.until_pods("rollout", rollout.get("nodes", 2))
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    return pods


def test_scaling_adds_nodes(live_training: LiveTraining):
    running(live_training)
    live_training.scale(4)
    live_training.until(lambda: live_training.replicas() == 4, "the live cluster is asked for 4")
    live_training.until_pods("rollout", 4)
    assert live_training.control["rolloutNodes"] == 4
    live_training.until(lambda: live_training.status["rolloutNodes"] == 4, "the scale subresource has 4")
    live_training.until(lambda: live_training.announced("Scaled"), "an event says so")
    assert len(live_training.attempts) == 1


@pytest.mark.worlds("memory", "real")
def test_the_idlest_replicas_go_first(live_training: LiveTraining):
    pods = running(live_training, nodes=3, maxNodes=3)
    idle = dict(zip(pods, (0.1, 0.9, 0.5), strict=True))
    message = "idle shares are reported"
    live_training.report(replicas=[{"pods": [pod], "idle": share} for pod, share in idle.items()], phase=message)
    live_training.until(lambda: message in live_training.whole_condition("Ready")["message"], "the report is seen")
    live_training.scale(1)
    assert live_training.until_pods("rollout", 1) == [pods[0]]
    assert live_training.replicas() == 1


def test_the_trainer_gets_the_names_of_pods_that_leave(live_training: LiveTraining):
    pods = running(live_training)
    live_training.report(replicas=[{"pods": [pod], "idle": share} for pod, share in zip(pods, (0.9, 0.1), strict=True)])
    seen: list[list[str]] = []

    def told() -> bool:
        seen.append(live_training.control.get("leaving", []))
        return seen[-1] == [pods[0]]

    live_training.edit(rollout={"nodes": 1})
    live_training.until(lambda: told() or live_training.pods("rollout") == [pods[1]], "the idle one leaves")
    assert live_training.until_pods("rollout", 1) == [pods[1]]


def test_pods_stay_until_their_replicas_have_drained(live_training: LiveTraining):
    pods = running(live_training)

    def report(*drained: str) -> None:
        live_training.report(replicas=[{"pods": [pod], "idle": 0.5, "drained": pod in drained} for pod in pods])

    report()
    live_training.scale(1)
    live_training.until(lambda: live_training.control.get("leaving"), "one of them is to leave")
    [leaving] = live_training.control["leaving"]
    live_training.until(lambda: live_training.announced("Draining"), "an event says so")
    live_training.plane.wait(60)
    assert sorted(live_training.pods("rollout")) == sorted(pods)
    report(leaving)
    assert live_training.until_pods("rollout", 1) == [pod for pod in pods if pod != leaving]
    live_training.until(lambda: not live_training.control["leaving"], "nobody leaves any more")


@pytest.mark.worlds("real")
def test_beyond_the_bounds_is_refused_by_the_api_server(live_training: LiveTraining):
    live_training.apply()
    with pytest.raises(RuntimeError, match="maxNodes 4 is below nodes 5"):
        live_training.kubectl("scale", "q35/demo", "--replicas=5")


def test_a_size_changed_before_the_cluster_exists_counts_as_well(live_training: LiveTraining):
    live_training.apply(suspend=True)
    live_training.until_state("Suspended")
    live_training.scale(3)
    live_training.edit(suspend=False)
    live_training.until_pods("rollout", 3)


def test_autoscale_grows_while_the_trainer_waits_for_rollouts(live_training: LiveTraining):
    running(live_training, **EAGER)
    live_training.report(trainIdle=0.8, rolloutIdle=0.05)
    live_training.until_pods("rollout", 4)
    live_training.until(lambda: live_training.status.get("autoscale", {}).get("nodes") == 4, "the choice is recorded")
    assert live_training.status["autoscale"]["reason"].startswith(
        "3 → 4: the train pool waits for rollouts: train idle 80%"
    )
    live_training.until(lambda: live_training.announced("Autoscaled"), "an event says so")
    assert live_training.body["spec"]["rollout"]["nodes"] == 2


def test_autoscale_shrinks_while_rollouts_have_too_little_to_do(live_training: LiveTraining):
    running(live_training, **EAGER)
    live_training.report(trainIdle=0.05, rolloutIdle=0.8)
    live_training.until_pods("rollout", 1)
    live_training.until(lambda: live_training.status.get("autoscale", {}).get("nodes") == 1, "the choice is recorded")
    assert live_training.status["autoscale"]["reason"].startswith("2 → 1: the rollout pool has too little to do")


def test_a_queues_size_is_not_touched(live_training: LiveTraining):
    running(live_training, QUEUE)
    live_training.edit(rollout={"nodes": 4})
    live_training.until_condition("Degraded", "True", "NodesFixedByQueue")
    assert live_training.replicas() == 2
    assert len(live_training.pods("rollout")) == 2


@pytest.mark.worlds("memory", "real")
def test_an_evicted_job_waits_for_its_queue_and_continues(live_training: LiveTraining):
    running(live_training, QUEUE)
    assert live_training.condition("QuotaReserved")[0] == "True"
    live_training.hold_in_queue(suspended=True)
    live_training.until_state("Queued")
    assert live_training.condition("QuotaReserved") == ("False", "QuotaPending")
    live_training.until(lambda: not live_training.mine("pods"), "KubeRay tears the cluster down")
    job = live_training.job()
    assert job is not None
    assert job["spec"]["suspend"] is True
    # Its last report is old by the time it is admitted again, and that is not a stall.
    live_training.report(versionTime=live_training.plane.now() - 61, versionSeconds=1.0)
    live_training.hold_in_queue(suspended=False)
    live_training.until_pods("rollout", 2)
    live_training.until_condition("QuotaReserved", "True", "QuotaReserved")
    assert [attempt["outcome"] for attempt in live_training.attempts] == ["Running"]


def test_somebody_elses_scaling_is_brought_back(live_training: LiveTraining):
    running(live_training)
    cluster = live_training.cluster()
    assert cluster is not None
    index = [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]].index("rollout")
    change = [{"op": "replace", "path": f"/spec/workerGroupSpecs/{index}/replicas", "value": 1}]
    path = live_training.path("rayclusters", cluster["metadata"]["name"])
    live_training.plane.api.request("PATCH", path, change, content="application/json-patch+json")
    live_training.until(lambda: live_training.replicas() == 2, "the size is as the spec says")
    live_training.until_pods("rollout", 2)
