"""The rollout pool grows and shrinks while it runs, and only where the size is ours to decide."""

import time
from typing import Any

import pytest

from tests.controlplane.story import Story

QUEUE = {"kueue.x-k8s.io/queue-name": "rl"}
EAGER = {"autoscale": {"stabilizationSeconds": 1, "growAbove": 0.3, "shrinkAbove": 0.5}}


def running(story: Story, labels: dict[str, str] | None = None, **rollout: Any) -> list[str]:
    """Names of the rollout pods of a training that runs."""
    story.apply(labels=labels, rollout=rollout)
    pods = story.until_pods("rollout", rollout.get("nodes", 2))
    story.report()
    story.until_condition("Ready", "True", "Running")
    return pods


def test_kubectl_scale_adds_nodes(story: Story):
    running(story)
    story.kubectl("scale", "q35/demo", "--replicas=4")
    story.until(lambda: story.replicas() == 4, "the live cluster is asked for 4")
    story.until_pods("rollout", 4)
    assert story.control["rolloutNodes"] == 4
    story.until(lambda: story.status["rolloutNodes"] == 4, "the scale subresource has 4")
    story.until(lambda: story.announced("Scaled"), "an event says so")
    assert len(story.attempts) == 1


def test_the_idlest_replicas_go_first(story: Story):
    pods = running(story, nodes=3, maxNodes=3)
    idle = dict(zip(pods, (0.1, 0.9, 0.5), strict=True))
    told = "idle shares are told"
    story.report(replicas=[{"pods": [pod], "idle": share} for pod, share in idle.items()], phase=told)
    story.until(lambda: told in story.told("Ready")["message"], "the report is seen")
    story.kubectl("scale", "q35/demo", "--replicas=1")
    assert story.until_pods("rollout", 1) == [pods[0]]
    assert story.replicas() == 1


def test_those_that_leave_are_told_to_the_trainer(story: Story):
    pods = running(story)
    story.report(replicas=[{"pods": [pod], "idle": share} for pod, share in zip(pods, (0.9, 0.1), strict=True)])
    seen: list[list[str]] = []

    def told() -> bool:
        seen.append(story.control.get("leaving", []))
        return seen[-1] == [pods[0]]

    story.edit(rollout={"nodes": 1})
    story.until(lambda: told() or story.pods("rollout") == [pods[1]], "the idle one leaves")
    assert story.until_pods("rollout", 1) == [pods[1]]


def test_beyond_the_bounds_is_refused_by_the_api_server(story: Story):
    story.apply()
    with pytest.raises(RuntimeError, match="maxNodes 4 is below nodes 5"):
        story.kubectl("scale", "q35/demo", "--replicas=5")


def test_a_size_changed_before_the_cluster_exists_counts_as_well(story: Story):
    story.apply(suspend=True)
    story.until_state("Suspended")
    story.kubectl("scale", "q35/demo", "--replicas=3")
    story.edit(suspend=False)
    story.until_pods("rollout", 3)


def test_autoscale_grows_while_the_trainer_waits_for_rollouts(story: Story):
    running(story, **EAGER)
    story.report(trainIdle=0.8, rolloutIdle=0.05)
    story.until_pods("rollout", 4)
    story.until(lambda: story.status.get("autoscale", {}).get("nodes") == 4, "the choice is recorded")
    assert story.status["autoscale"]["reason"].startswith("3 → 4: the train pool waits for rollouts: train idle 80%")
    story.until(lambda: story.announced("Autoscaled"), "an event says so")
    assert story.body["spec"]["rollout"]["nodes"] == 2


def test_autoscale_shrinks_while_rollouts_have_too_little_to_do(story: Story):
    running(story, **EAGER)
    story.report(trainIdle=0.05, rolloutIdle=0.8)
    story.until_pods("rollout", 1)
    story.until(lambda: story.status.get("autoscale", {}).get("nodes") == 1, "the choice is recorded")
    assert story.status["autoscale"]["reason"].startswith("2 → 1: the rollout pool has too little to do")


def test_a_queues_size_is_not_touched(story: Story):
    running(story, QUEUE)
    story.edit(rollout={"nodes": 4})
    story.until_condition("Degraded", "True", "NodesFixedByQueue")
    assert story.replicas() == 2
    assert len(story.pods("rollout")) == 2


def test_an_elastic_job_of_a_queue_is_scaled(story: Story):
    running(story, QUEUE | {"kueue.x-k8s.io/elastic-job": "true"})
    story.edit(rollout={"nodes": 4})
    story.until_pods("rollout", 4)


def test_an_evicted_job_waits_for_its_queue_and_goes_on(story: Story):
    running(story, QUEUE)
    assert story.condition("QuotaReserved")[0] == "True"
    story.hold_in_queue(suspended=True)
    story.until_state("Queued")
    assert story.condition("QuotaReserved") == ("False", "QuotaPending")
    story.until(lambda: not story.mine("pods"), "KubeRay tears the cluster down")
    job = story.job()
    assert job is not None
    assert job["spec"]["suspend"] is True
    # What it said last is old by the time it is let in again, and that is no stall.
    story.report(versionTime=time.time() - 61, versionSeconds=1.0)
    story.hold_in_queue(suspended=False)
    story.until_pods("rollout", 2)
    story.until_condition("QuotaReserved", "True", "QuotaReserved")
    assert [one["outcome"] for one in story.attempts] == ["Running"]


def test_somebody_elses_scaling_is_brought_back(story: Story):
    running(story)
    cluster = story.cluster()
    assert cluster is not None
    index = [one["groupName"] for one in cluster["spec"]["workerGroupSpecs"]].index("rollout")
    change = [{"op": "replace", "path": f"/spec/workerGroupSpecs/{index}/replicas", "value": 1}]
    path = story.path("rayclusters", cluster["metadata"]["name"])
    story.plane.api.request("PATCH", path, change, content="application/json-patch+json")
    story.until(lambda: story.replicas() == 2, "the size is as the spec says")
    story.until_pods("rollout", 2)
