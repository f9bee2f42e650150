"""What somebody takes away or changes by hand comes back."""

import pytest

from tests.controlplane.cases import first_real
from tests.controlplane.story import Story


@pytest.mark.parametrize(
    ("plural", "name"),
    # Of the first the operator watches the whole object, of the second the metadata.
    first_real(
        [
            ("configmaps", "demo-control"),
            ("roles", "demo-trainer"),
            ("configmaps", "demo-config"),
            ("configmaps", "demo-progress"),
            ("serviceaccounts", "demo-trainer"),
            ("rolebindings", "demo-trainer"),
            ("networkpolicies", "demo"),
        ],
        2,
    ),
)
def test_a_deleted_child_is_made_again(story: Story, plural: str, name: str):
    story.apply()
    story.until_job()
    before = story.get(plural, name)
    story.plane.api.request("DELETE", story.path(plural, name))

    def again() -> bool:
        found = story.find(plural, name)
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    story.until(again, f"{plural}/{name} is there again")
    after = story.get(plural, name)
    assert after["metadata"].get("annotations") == before["metadata"].get("annotations")
    assert [one["outcome"] for one in story.attempts] == ["Running"]


def test_a_deleted_pod_is_replaced_and_the_attempt_goes_on(story: Story):
    story.apply()
    pods = story.until_pods("rollout", 2)
    story.report()
    story.until_condition("Ready", "True", "Running")
    story.plane.api.request("DELETE", story.path("pods", pods[0]))
    story.until(lambda: pods[0] not in story.until_pods("rollout", 2), "another pod has its place")
    story.until_condition("RolloutReady", "True", "NodesReady")
    assert len(story.attempts) == 1


def test_a_deleted_cluster_is_rebuilt_by_kuberay(story: Story):
    story.apply()
    story.until_pods("rollout", 2)
    cluster = story.cluster()
    assert cluster is not None
    story.plane.api.request("DELETE", story.path("rayclusters", cluster["metadata"]["name"]))

    def rebuilt() -> bool:
        found = story.cluster()
        return found is not None and found["metadata"]["uid"] != cluster["metadata"]["uid"]

    story.until(rebuilt, "there is a new cluster")
    story.until_condition("ClusterReady", "True", "NodesReady")


def test_every_job_deleted_by_hand_is_followed_by_one_more(story: Story):
    story.apply(failurePolicy={"maxRestarts": 2, "backoffSeconds": 0})
    for attempt in (1, 2, 3):
        story.until_job(attempt)
        story.plane.api.request("DELETE", story.path("rayjobs", f"demo-{attempt}"))
    story.until_condition("Failed", "True", "RestartsExhausted")
    assert [one["number"] for one in story.attempts] == [1, 2, 3]
    assert story.job(4) is None
