"""Stories under a queue, with a controller that does to RayJobs what Kueue's integration does (tests/virtual/kueue.py)."""

from typing import Any

import pytest

from tests.controlplane.live_training import LiveTraining
from tests.controlplane.story_place import StoryPlace
from tests.virtual.kueue import FLAVOR, Kueue

pytestmark = pytest.mark.worlds("memory", only=True)

QUEUE = {"kueue.x-k8s.io/queue-name": "research"}
PODS = 4
"""Pods of the training: a head, two rollout nodes and a train node. The quota has room for one more."""


@pytest.fixture(autouse=True)
def kueue(world: StoryPlace) -> Kueue:
    assert world.operators is not None
    plane = world.operators.plane
    kueue = Kueue(plane.server, pods=PODS + 1, priorities={"low": -1, "high": 1})
    plane.tasks.append(plane.loop.create_task(kueue.run()))
    return kueue


def workloads(live_training: LiveTraining) -> dict[str, dict[str, str]]:
    """Status of each condition, by Workload."""
    items = live_training.plane.api.get(collection(live_training))["items"]
    return {
        item["metadata"]["name"]: {
            condition["type"]: condition["status"] for condition in item.get("status", {}).get("conditions", ())
        }
        for item in items
    }


def collection(live_training: LiveTraining) -> str:
    return f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{live_training.namespace}/workloads"


def compete(live_training: LiveTraining, name: str, *, priority: int, pods: int = PODS) -> None:
    """Another job of the queue, of which only the Workload is of interest."""
    sets = [{"name": "main", "count": pods, "template": {"spec": {}}}]
    spec = {"podSets": sets, "queueName": "research", "priority": priority}
    live_training.plane.api.post(collection(live_training), {"metadata": {"name": name}, "spec": spec})


def finish(live_training: LiveTraining, name: str) -> None:
    live_training.plane.api.request("DELETE", f"{collection(live_training)}/{name}")


def admitted(live_training: LiveTraining, name: str) -> bool:
    return workloads(live_training)[name].get("Admitted") == "True"


def own_workload(live_training: LiveTraining) -> str:
    (name,) = [name for name in workloads(live_training) if name.startswith("rayjob-")]
    return name


def test_six_preemptions_of_a_trainer_that_reports_them_cost_no_attempt_no_restart_and_no_prompt(
    live_training: LiveTraining, ray_jobs: None, world: StoryPlace
):
    """Six: one more than `maxRestarts` of this training allows, twice."""
    live_training.apply(script=[[{"train": 300}, {"succeed": "all done"}]], labels=QUEUE)
    for preemption in range(6):
        live_training.until_state("Running")
        live_training.plane.wait(5)  # it trains
        workload, rival = own_workload(live_training), f"rival-{preemption}"
        compete(live_training, rival, priority=10)
        live_training.until(lambda rival=rival: admitted(live_training, rival), "the more important job is admitted")
        live_training.until_state("Queued")
        assert live_training.condition("QuotaReserved") == ("False", "QuotaPending")
        assert live_training.mine("rayclusters") == []
        report = live_training.get("configmaps", "demo-progress")["data"]["progress.json"]
        assert '"state": "Stopped"' in report, "the trainer reports that it was interrupted"
        live_training.plane.wait(600)
        assert live_training.state == "Queued"
        assert own_workload(live_training) == workload, "it keeps its place in the queue"
        finish(live_training, rival)
    live_training.until_state("Succeeded")
    (attempt,) = live_training.attempts
    assert (attempt["outcome"], attempt["evictions"], live_training.restarts) == ("Succeeded", 6, 0)
    assert 60 < live_training.status["activeSeconds"] < 3600, "an hour in the queue does not count"
    assert world.operators is not None
    jobs: Any = world.operators.plane.ray_jobs.dashboards
    (volume,) = jobs.volumes.values()
    assert volume["log"] == list(range(300)), "every prompt was trained once, in order"


def test_a_preempted_training_goes_before_those_that_came_after_it(live_training: LiveTraining, ray_jobs: None):
    live_training.apply(script=[[{"train": 300}, {"succeed": "all done"}]], labels=QUEUE)
    live_training.until_state("Running")
    live_training.plane.wait(1)
    compete(live_training, "rival", priority=10)
    compete(live_training, "later", priority=0)
    live_training.until_state("Queued")
    live_training.until(lambda: admitted(live_training, "rival"), "the more important job is admitted")
    finish(live_training, "rival")
    live_training.until_state("Succeeded")
    live_training.until(lambda: admitted(live_training, "later"), "the later job follows")


def test_the_priority_class_of_the_training_counts(live_training: LiveTraining, ray_jobs: None):
    """The labels of the training reach the RayJob, and Kueue reads them there."""
    live_training.apply(labels=QUEUE | {"kueue.x-k8s.io/priority-class": "high"})
    live_training.until(live_training.cluster, "it is admitted")
    compete(live_training, "rival", priority=0)
    live_training.plane.wait(60)
    assert not admitted(live_training, "rival")
    assert admitted(live_training, own_workload(live_training))


def test_pods_go_to_the_nodes_that_the_queue_has_chosen(live_training: LiveTraining):
    live_training.apply(labels=QUEUE)
    live_training.until_pods("rollout", 2)
    for pod in live_training.mine("pods"):
        assert FLAVOR.items() <= pod["spec"]["nodeSelector"].items()
    assert len(live_training.attempts) == 1
    assert live_training.control["attempt"] == 1


def test_a_training_that_never_fits_waits_without_pods_and_without_a_deadline(live_training: LiveTraining):
    live_training.apply(labels=QUEUE, rollout={"nodes": 4}, activeDeadlineSeconds=600)
    live_training.until_state("Queued")
    live_training.plane.wait(5 * 600)
    assert live_training.state == "Queued"
    assert live_training.mine("pods") == []


def test_under_a_queue_the_pool_never_has_more_nodes_than_were_admitted(live_training: LiveTraining):
    live_training.apply(labels=QUEUE)
    live_training.until_pods("rollout", 2)
    live_training.report()
    live_training.until_state("Running")
    live_training.edit(rollout={"nodes": 3})
    live_training.until_condition("Degraded", "True", "NodesFixedByQueue")
    live_training.plane.wait(60)
    assert live_training.replicas() == 2
    live_training.edit(rollout={"nodes": 1})
    live_training.until_pods("rollout", 1)
    live_training.edit(suspend=True)
    live_training.until(lambda: live_training.order is not None, "it is asked to stop")
    live_training.report("Stopped", stopAcknowledged=live_training.order["id"])  # type: ignore[index]
    live_training.until_state("Suspended")
    live_training.edit(suspend=False, rollout={"nodes": 3})
    live_training.until_pods("rollout", 3)


def test_suspending_a_preempted_training_takes_it_out_of_the_queue(live_training: LiveTraining, ray_jobs: None):
    live_training.apply(script=[[{"train": 300}]], labels=QUEUE)
    live_training.until_state("Running")
    compete(live_training, "rival", priority=10)
    live_training.until_state("Queued")
    live_training.edit(suspend=True)
    live_training.until_state("Suspended")
    live_training.until(lambda: list(workloads(live_training)) == ["rival"], "its Workload is gone")
