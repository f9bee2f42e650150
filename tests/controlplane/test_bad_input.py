"""What is wrong with a training, or beside it: a condition says so, and all goes on when it is put right.

The same operator process lives through all of it.
"""

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.controlplane.cases import first_real
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story import Story
from tests.testbed.ray_head import RayHead

OURS = {"rl.qwen35.io/training": "demo"}
FOREIGN: list[tuple[str, str, dict[str, Any]]] = [
    (
        "rayjobs",
        "demo-1",
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "spec": {"entrypoint": "mine", "clusterSelector": {"ray.io/cluster": "none"}},
        },
    ),
    ("configmaps", "demo-config", {"data": {"training.yaml": "mine"}}),
    ("configmaps", "demo-progress", {"data": {"progress.json": "mine"}}),
    ("configmaps", "demo-control", {"data": {"control.json": "mine"}}),
    ("serviceaccounts", "demo-trainer", {}),
    ("roles", "demo-trainer", {"rules": []}),
    (
        "rolebindings",
        "demo-trainer",
        {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "mine"}},
    ),
    ("networkpolicies", "demo", {"spec": {"podSelector": {"matchLabels": {"a": "b"}}}}),
]


@pytest.fixture(autouse=True)
def _the_operator_survives(operator: OperatorProcess) -> Iterator[None]:
    before = operator.pid
    yield
    assert operator.pid == before


@pytest.mark.parametrize(
    ("plural", "name", "body"), first_real(FOREIGN, 2), ids=[f"{kind} {name}" for kind, name, _ in FOREIGN]
)
def test_a_foreign_object_is_never_adopted(story: Story, plural: str, name: str, body: dict[str, Any]):
    # Half of them even look like ours.
    labels = OURS if plural in ("configmaps", "rayjobs") else {}
    story.plane.api.post(story.path(plural, None), {"metadata": {"name": name, "labels": labels}} | body)
    if plural == "rayjobs":
        story.until(lambda: story.get(plural, name).get("status"), "KubeRay has seen its job")
    before = spec_of(story.get(plural, name))
    story.apply()
    story.until_condition("Accepted", "False", "NameTaken")
    assert name in story.told("Accepted")["message"]
    assert story.condition("Stalled") == ("True", "NameTaken")
    assert spec_of(story.get(plural, name)) == before

    story.plane.api.request("DELETE", story.path(plural, name))
    story.until_condition("Accepted", "True", "Accepted")
    story.until(lambda: story.mine("rayjobs"), "it has a job now")


def test_a_child_that_is_labelled_as_anothers_by_hand_is_not_lost(story: Story):
    story.apply()
    story.until_pods("train", 1)
    for name in ("demo-config", "demo-progress"):
        story.patch(story.path("configmaps", name), {"metadata": {"labels": {"rl.qwen35.io/training": "other"}}})
    story.until(
        lambda: {"demo-config", "demo-progress"} <= {one["metadata"]["name"] for one in story.mine("configmaps")},
        "it has its label again",
    )
    story.report(update=7, version=7)
    story.until(lambda: story.status.get("progress", {}).get("update") == 7, "its reports are read")
    assert [one["number"] for one in story.attempts] == [1]


def test_a_job_that_is_labelled_as_anothers_by_hand_counts_as_deleted_and_is_waited_for(story: Story):
    story.apply()
    story.until_pods("train", 1)
    story.patch(story.path("rayjobs", "demo-1"), {"metadata": {"labels": {"rl.qwen35.io/training": "other"}}})
    story.until_condition("Reconciling", "True", "Cleaning")
    assert [(one["outcome"], one["reason"]) for one in story.attempts] == [("Failed", "JobDeleted")]
    assert story.cluster()["metadata"]["name"] in story.told("Reconciling")["message"]
    story.plane.api.request("DELETE", story.path("rayjobs", "demo-1"))
    story.until_job(attempt=2)


def spec_of(manifest: dict[str, Any]) -> str:
    """All of it, but for what its own controller writes."""
    about = {
        key: value for key, value in manifest["metadata"].items() if key not in ("resourceVersion", "managedFields")
    }
    status_free = {key: value for key, value in manifest.items() if key != "status"}
    if manifest.get("kind") != "RayJob":
        about["resourceVersion"] = manifest["metadata"]["resourceVersion"]
    return json.dumps(status_free | {"metadata": about}, sort_keys=True)


def test_every_problem_of_a_spec_is_told_at_once(story: Story):
    wrong = {"spec": {"hostNetwork": True, "containers": [{"name": "ray", "image": "mine"}]}}
    story.apply(pods={"head": wrong})
    story.until_condition("Accepted", "False", "Invalid")
    message = story.told("Accepted")["message"]
    assert "spec.pods.head.spec.hostNetwork" in message
    assert "image" in message
    assert story.mine("rayjobs") == []
    story.edit(suspend=True)
    story.edit(pods={"head": None})
    story.edit(suspend=False)
    story.until_condition("Accepted", "True", "Accepted")
    story.until_job()


UNREADABLE = ["x" * 1_000_000, "\u0000\ud7ff", "", "{}", "[1", '{"attempt": "one"}', "null"]


@pytest.mark.parametrize(
    "text", first_real(UNREADABLE), ids=["long", "no letters", "empty", "{}", "[1", "attempt one", "null"]
)
def test_an_unreadable_report_is_told_and_the_last_numbers_stay(story: Story, text: str):
    story.apply()
    story.until_pods("train", 1)
    story.report(update=5, version=5)
    story.until_condition("Ready", "True", "Running")
    story.write(text)
    if text:
        story.until_condition("Degraded", "True", "ProgressUnreadable")
    assert story.status["progress"]["update"] == 5
    assert story.attempts[0]["outcome"] == "Running"
    story.report(update=6, version=6)
    story.until(lambda: story.status["progress"]["update"] == 6, "newer numbers are read")
    story.until_condition("Ready", "True", "Running")
    story.until_condition("Degraded", "False", "AsExpected")


def test_a_trainer_that_writes_nonsense_can_still_succeed(story: Story, ray_head: RayHead):
    steps = [{"publish": 1}, {"write": 1_000_000}, {"write": "garbage"}, {"publish": 1}, {"succeed": "all done"}]
    story.apply(script=[steps])
    story.until_state("Succeeded")
    assert story.status["progress"]["update"] == 2


@pytest.mark.parametrize("skew", first_real([-3600.0, 3600.0]))
def test_a_clock_that_is_off_is_told_and_corrected(story: Story, skew: float):
    story.apply(failurePolicy={"stallFactor": 2})
    story.until_pods("train", 1)
    clock = time.time() + skew
    story.report(time=clock, versionTime=clock, versionSeconds=10.0)
    story.until_condition("Degraded", "True", "ClockSkew")
    seconds = re.findall(r"(\d+) s\b", story.told("Degraded")["message"])
    # The report may have been on its way for a while.
    assert [int(one) for one in seconds] == [pytest.approx(abs(skew), abs=60)]
    assert story.attempts[0]["outcome"] == "Running"
    assert story.state == "Running"
    # What is written in the second in which the head was made may be of another head before it.
    (head,) = story.mine("pods", ",rl.qwen35.io/pool=head")
    made = datetime.fromisoformat(head["metadata"]["creationTimestamp"]).timestamp()
    story.until(lambda: time.time() >= made + 1, "the second is over in which the head was made")
    clock = time.time() + skew
    story.report(time=clock, versionTime=clock - 61, versionSeconds=1.0)
    story.until(lambda: story.first["outcome"] == "Failed", "a stall is a stall, whatever the clock says")
    assert story.attempts[0]["reason"] == "Stalled"


def test_a_used_up_quota_is_told(story: Story):
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/rayjobs.ray.io": "0"}}}
    story.plane.api.post(story.path("resourcequotas", None), quota)
    counted = story.path("resourcequotas", "none")
    story.until(lambda: "used" in story.plane.api.get(counted).get("status", {}), "the quota is in force")
    story.apply()
    story.until_condition("Ready", "False", "QuotaExceeded")
    assert story.condition("Accepted")[0] == "True"
    assert "none" in story.told("Ready")["message"]
    story.plane.api.request("DELETE", counted)
    story.until_job()
    story.until(lambda: story.condition("Ready")[1] != "QuotaExceeded", "it goes on")
    assert [one["number"] for one in story.attempts] == [1]
