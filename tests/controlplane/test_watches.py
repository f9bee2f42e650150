"""What somebody takes away or changes by hand comes back."""

import pytest

from tests.controlplane.cases import first_on_both
from tests.controlplane.live_training import LiveTraining

pytestmark = pytest.mark.worlds("memory")


@pytest.mark.parametrize(
    ("plural", "name"),
    # Of the first the operator watches the whole object, of the second the metadata.
    first_on_both(
        [
            ("configmaps", "demo-control"),
            ("roles", "demo-trainer"),
            ("configmaps", "demo-config"),
            ("configmaps", "demo-progress"),
            ("serviceaccounts", "demo-trainer"),
            ("rolebindings", "demo-trainer"),
            ("networkpolicies", "demo"),
            ("poddisruptionbudgets", "demo-disruptions"),
        ],
        2,
    ),
)
def test_a_deleted_child_is_made_again(live_training: LiveTraining, plural: str, name: str):
    live_training.apply(disruptionBudget="HeadAndTrain")
    live_training.until(lambda: live_training.find(plural, name) is not None, f"{plural}/{name} is there")
    live_training.until_job()
    before = live_training.get(plural, name)
    live_training.plane.api.request("DELETE", live_training.path(plural, name))

    def again() -> bool:
        body = live_training.find(plural, name)
        return body is not None and body["metadata"]["uid"] != before["metadata"]["uid"]

    live_training.until(again, f"{plural}/{name} is there again")
    after = live_training.get(plural, name)
    assert after["metadata"].get("annotations") == before["metadata"].get("annotations")
    assert [item["outcome"] for item in live_training.attempts] == ["Running"]


def test_a_deleted_pod_is_replaced_and_the_attempt_continues(live_training: LiveTraining):
    live_training.apply()
    pods = live_training.until_pods("rollout", 2)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    live_training.plane.api.request("DELETE", live_training.path("pods", pods[0]))
    live_training.until(lambda: pods[0] not in live_training.until_pods("rollout", 2), "another pod has its place")
    live_training.until_condition("RolloutReady", "True", "NodesReady")
    assert len(live_training.attempts) == 1


@pytest.mark.worlds("memory", "real")
def test_a_deleted_cluster_is_rebuilt_by_kuberay(live_training: LiveTraining):
    live_training.apply()
    live_training.until_pods("rollout", 2)
    cluster = live_training.cluster()
    assert cluster is not None
    live_training.plane.api.request("DELETE", live_training.path("rayclusters", cluster["metadata"]["name"]))

    def rebuilt() -> bool:
        ray_cluster = live_training.cluster()
        return ray_cluster is not None and ray_cluster["metadata"]["uid"] != cluster["metadata"]["uid"]

    live_training.until(rebuilt, "there is a new cluster")
    live_training.until_condition("ClusterReady", "True", "NodesReady")


def test_every_job_deleted_by_hand_is_followed_by_one_more(live_training: LiveTraining):
    live_training.apply(failurePolicy={"maxRestarts": 2, "backoffSeconds": 0})
    for attempt in (1, 2, 3):
        live_training.until_job(attempt)
        live_training.plane.api.request("DELETE", live_training.path("rayjobs", f"demo-{attempt}"))
    live_training.until_condition("Failed", "True", "RestartsExhausted")
    assert [item["number"] for item in live_training.attempts] == [1, 2, 3]
    assert live_training.job(4) is None
