"""Faults of a training or of objects around it: a condition reports each, and the training continues once it is repaired.

The same operator process lives through all of it.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.controlplane.cases import first_on_both
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.virtual.operators import VirtualOperator

pytestmark = pytest.mark.worlds("memory")

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
def _the_operator_survives(operator: OperatorProcess | VirtualOperator) -> Iterator[None]:
    before = operator.pid
    yield
    assert operator.pid == before


@pytest.mark.parametrize(
    ("plural", "name", "body"), first_on_both(FOREIGN, 2), ids=[f"{kind} {name}" for kind, name, _ in FOREIGN]
)
def test_a_foreign_object_is_never_adopted(live_training: LiveTraining, plural: str, name: str, body: dict[str, Any]):
    # Half of them even look like ours.
    labels = OURS if plural in ("configmaps", "rayjobs") else {}
    live_training.plane.api.post(
        live_training.path(plural, None), {"metadata": {"name": name, "labels": labels}} | body
    )
    if plural == "rayjobs":
        live_training.until(lambda: live_training.get(plural, name).get("status"), "KubeRay has seen its job")
    before = spec_of(live_training.get(plural, name))
    live_training.apply()
    live_training.until_condition("Accepted", "False", "NameTaken")
    assert name in live_training.whole_condition("Accepted")["message"]
    assert live_training.condition("Stalled") == ("True", "NameTaken")
    assert spec_of(live_training.get(plural, name)) == before

    live_training.plane.api.request("DELETE", live_training.path(plural, name))
    live_training.until_condition("Accepted", "True", "Accepted")
    live_training.until(lambda: live_training.mine("rayjobs"), "it has a job now")


def test_a_child_that_is_labelled_as_anothers_by_hand_is_not_lost(live_training: LiveTraining):
    live_training.apply()
    live_training.until_pods("train", 1)
    for name in ("demo-config", "demo-progress"):
        live_training.patch(
            live_training.path("configmaps", name), {"metadata": {"labels": {"rl.qwen35.io/training": "other"}}}
        )
    live_training.until(
        lambda: (
            {"demo-config", "demo-progress"}
            <= {config_map["metadata"]["name"] for config_map in live_training.mine("configmaps")}
        ),
        "it has its label again",
    )
    live_training.report(update=7, version=7)
    live_training.until(lambda: live_training.status.get("progress", {}).get("update") == 7, "its reports are read")
    assert [attempt["number"] for attempt in live_training.attempts] == [1]


def test_a_job_that_is_labelled_as_anothers_by_hand_counts_as_deleted_and_is_waited_for(live_training: LiveTraining):
    live_training.apply()
    live_training.until_pods("train", 1)
    live_training.patch(
        live_training.path("rayjobs", "demo-1"), {"metadata": {"labels": {"rl.qwen35.io/training": "other"}}}
    )
    live_training.until_condition("Reconciling", "True", "Cleaning")
    assert [(attempt["outcome"], attempt["reason"]) for attempt in live_training.attempts] == [("Failed", "JobDeleted")]
    assert live_training.cluster()["metadata"]["name"] in live_training.whole_condition("Reconciling")["message"]
    live_training.plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    live_training.until_job(attempt=2)


def spec_of(manifest: dict[str, Any]) -> str:
    """All of it, but for what its own controller writes."""
    metadata = {
        key: value for key, value in manifest["metadata"].items() if key not in ("resourceVersion", "managedFields")
    }
    status_free = {key: value for key, value in manifest.items() if key != "status"}
    if manifest.get("kind") != "RayJob":
        metadata["resourceVersion"] = manifest["metadata"]["resourceVersion"]
    return json.dumps(status_free | {"metadata": metadata}, sort_keys=True)


def test_all_problems_of_a_spec_are_reported_together(live_training: LiveTraining):
    wrong = {"spec": {"hostNetwork": True, "containers": [{"name": "ray", "image": "mine"}]}}
    live_training.apply(pods={"head": wrong})
    live_training.until_condition("Accepted", "False", "Invalid")
    message = live_training.whole_condition("Accepted")["message"]
    assert "spec.pods.head.spec.hostNetwork" in message
    assert "image" in message
    assert live_training.mine("rayjobs") == []
    live_training.edit(suspend=True)
    live_training.edit(pods={"head": None})
    live_training.edit(suspend=False)
    live_training.until_condition("Accepted", "True", "Accepted")
    live_training.until_job()


UNREADABLE = ["x" * 1_000_000, "\u0000\ud7ff", "", "{}", "[1", '{"attempt": "one"}', "null"]


@pytest.mark.parametrize(
    "text", first_on_both(UNREADABLE), ids=["long", "no letters", "empty", "{}", "[1", "attempt one", "null"]
)
def test_an_unreadable_report_is_reported_and_the_last_numbers_stay(live_training: LiveTraining, text: str):
    live_training.apply()
    live_training.until_pods("train", 1)
    live_training.report(update=5, version=5)
    live_training.until_condition("Ready", "True", "Running")
    live_training.write(text)
    if text:
        live_training.until_condition("Degraded", "True", "ProgressUnreadable")
    assert live_training.status["progress"]["update"] == 5
    assert live_training.attempts[0]["outcome"] == "Running"
    live_training.report(update=6, version=6)
    live_training.until(lambda: live_training.status["progress"]["update"] == 6, "newer numbers are read")
    live_training.until_condition("Ready", "True", "Running")
    live_training.until_condition("Degraded", "False", "AsExpected")


def test_a_trainer_that_writes_nonsense_can_still_succeed(live_training: LiveTraining, ray_jobs: None):
    steps = [{"publish": 1}, {"write": 1_000_000}, {"write": "garbage"}, {"publish": 1}, {"succeed": "all done"}]
    live_training.apply(script=[steps])
    live_training.until_state("Succeeded")
    assert live_training.status["progress"]["update"] == 2


@pytest.mark.parametrize("skew", first_on_both([-3600.0, 3600.0]))
def test_a_clock_that_is_off_is_reported_and_corrected(live_training: LiveTraining, skew: float):
    live_training.apply(failurePolicy={"stallFactor": 2})
    live_training.until_pods("train", 1)
    clock = live_training.plane.now() + skew
    live_training.report(time=clock, versionTime=clock, versionSeconds=10.0)
    live_training.until_condition("Degraded", "True", "ClockSkew")
    seconds = re.findall(r"(\d+) s\b", live_training.whole_condition("Degraded")["message"])
    # The report may have been on its way for a while.
    assert [int(item) for item in seconds] == [pytest.approx(abs(skew), abs=60)]
    assert live_training.attempts[0]["outcome"] == "Running"
    assert live_training.state == "Running"
    # What is written in the second in which the head was made may be of another head before it.
    (head,) = live_training.mine("pods", ",rl.qwen35.io/pool=head")
    made = datetime.fromisoformat(head["metadata"]["creationTimestamp"]).timestamp()
    live_training.until(lambda: live_training.plane.now() >= made + 1, "the second is over in which the head was made")
    clock = live_training.plane.now() + skew
    live_training.report(time=clock, versionTime=clock - 61, versionSeconds=1.0)
    live_training.until(
        lambda: live_training.first["outcome"] == "Failed", "a stall is a stall, whatever the clock says"
    )
    assert live_training.attempts[0]["reason"] == "Stalled"


def test_a_used_up_quota_is_reported(live_training: LiveTraining):
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/rayjobs.ray.io": "0"}}}
    live_training.plane.api.post(live_training.path("resourcequotas", None), quota)
    counted = live_training.path("resourcequotas", "none")
    live_training.until(
        lambda: "used" in live_training.plane.api.get(counted).get("status", {}), "the quota is in force"
    )
    live_training.apply()
    live_training.until_condition("Ready", "False", "QuotaExceeded")
    assert live_training.condition("Accepted")[0] == "True"
    assert "none" in live_training.whole_condition("Ready")["message"]
    live_training.plane.api.request("DELETE", counted)
    live_training.until_job()
    live_training.until(lambda: live_training.condition("Ready")[1] != "QuotaExceeded", "it continues")
    assert [attempt["number"] for attempt in live_training.attempts] == [1]
