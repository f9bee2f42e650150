"""Edits of children by hand are repaired within a minute; what others add is kept; what a later release drops is removed."""

import json
from typing import Any

import pytest

from qwen35_operator.reconcile.drift import FIRST_READS_SECONDS, REPAIR_SECONDS, REPORTS_FIRST_SECONDS
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.virtual.operators import VirtualOperator
from tests.virtual.plane import VirtualPlane

pytestmark = pytest.mark.worlds("memory")

APPLY = "application/apply-patch+yaml"
FOREIGN = {"metadata": {"labels": {"other.example/team": "red"}, "annotations": {"other.example/seen": "yes"}}}
ANYTHING = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
SOMEBODY = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "somebody"}]
EDITS: dict[str, dict[str, Any]] = {
    "networkpolicies/demo": {"spec": {"podSelector": {"matchLabels": {"none": "x"}}, "ingress": [{}], "egress": None}},
    "poddisruptionbudgets/demo-disruptions": {"spec": {"minAvailable": 0}},
    "roles/demo-trainer": {"rules": ANYTHING},
    "rolebindings/demo-trainer": {"subjects": SOMEBODY},
    "serviceaccounts/demo-trainer": {"automountServiceAccountToken": True},
    "configmaps/demo-config": {"data": {"training.yaml": "tampered"}},
    "configmaps/demo-control": {"data": {"control.json": "tampered"}},
}
"""One edit of every child that the operator keeps as it is."""


def begun(live_training: LiveTraining) -> dict[str, dict[str, Any]]:
    """Start a training. Returns its children as the operator has written them."""
    live_training.apply(disruptionBudget="HeadAndTrain")
    live_training.until_pods("rollout", 2)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    return {child: live_training.get(*child.split("/")) for child in EDITS}


def content(body: dict[str, Any]) -> dict[str, Any]:
    """What the operator writes. The status of a PodDisruptionBudget is of Kubernetes."""
    return {name: value for name, value in body.items() if name not in ("metadata", "status")}


def is_repaired(live_training: LiveTraining, children: dict[str, dict[str, Any]]) -> bool:
    return all(content(live_training.get(*child.split("/"))) == content(body) for child, body in children.items())


@pytest.mark.worlds("memory", "real")
def test_edits_by_hand_are_repaired_and_what_others_add_is_kept(live_training: LiveTraining):
    before = begun(live_training)
    edited = live_training.plane.monotonic()
    for child, edit in EDITS.items():
        live_training.patch(live_training.path(*child.split("/")), edit | FOREIGN)
    live_training.until(lambda: is_repaired(live_training, before), "all children are as they were")
    if isinstance(live_training.plane, VirtualPlane):
        assert live_training.plane.monotonic() < edited + 60
    for child, body in before.items():
        now = live_training.get(*child.split("/"))["metadata"]
        for part, added in FOREIGN["metadata"].items():
            assert now[part] == body["metadata"].get(part, {}) | added
        assert now["ownerReferences"] == body["metadata"]["ownerReferences"]
        operations = {entry["operation"] for entry in now["managedFields"] if entry["manager"] == "qwen35-operator"}
        assert operations == {"Apply"}
    assert [attempt["outcome"] for attempt in live_training.attempts] == ["Running"]


def test_what_was_changed_while_no_operator_ran_is_repaired(live_training: LiveTraining, operator: VirtualOperator):
    before = begun(live_training)
    operator.stop()
    for child, edit in EDITS.items():
        live_training.patch(live_training.path(*child.split("/")), edit)
    operator.start()
    began = live_training.plane.monotonic()
    live_training.until(lambda: is_repaired(live_training, before), "all children are as they were")
    assert live_training.plane.monotonic() - began < REPORTS_FIRST_SECONDS, (
        "they are read before those without a change"
    )


def test_an_operator_that_starts_changes_nothing_that_is_as_it_was(
    live_training: LiveTraining, operator: OperatorProcess | VirtualOperator
):
    before = begun(live_training)
    operator.stop()
    operator.start()
    live_training.report(update=7)
    live_training.until(lambda: live_training.status["progress"]["update"] == 7, "the operator works")
    after = {child: live_training.get(*child.split("/")) for child in EDITS}
    assert {child: content(body) for child, body in after.items()} == {c: content(b) for c, b in before.items()}
    versions = {child: body["metadata"]["resourceVersion"] for child, body in after.items()}
    operator.stop()
    operator.start()
    live_training.report(update=8)
    live_training.plane.wait(FIRST_READS_SECONDS + 2)
    live_training.until(lambda: live_training.status["progress"]["update"] == 8, "the operator works")
    assert {c: live_training.get(*c.split("/"))["metadata"]["resourceVersion"] for c in EDITS} == versions


def test_a_controller_that_always_writes_again_does_not_keep_the_operator_busy(
    live_training: LiveTraining, operator: VirtualOperator
):
    begun(live_training)
    path = live_training.path("networkpolicies")

    def requests() -> float:
        return sum(
            n
            for name, n in operator.metrics().items()
            if name.startswith("qwen35_api_requests_total") and 'resource="networkpolicies"' in name
        )

    before = requests()
    seconds = 120
    for number in range(seconds * 2):
        live_training.patch(path, {"metadata": {"annotations": {"other.example/number": str(number)}}})
        live_training.plane.wait(0.5)
    assert 0 < requests() - before <= seconds / REPAIR_SECONDS + 6


@pytest.mark.parametrize("operation", ["an apply", "a merge patch"])
def test_what_an_earlier_release_wrote_and_this_one_does_not_is_removed(live_training: LiveTraining, operation: str):
    """Releases before server-side apply created and merge-patched their objects."""
    before = begun(live_training)["configmaps/demo-config"]
    path = f"{live_training.path('configmaps', 'demo-config')}?fieldManager=qwen35-operator"
    # An object with other fields has another hash.
    marks = {"labels": {"rl.qwen35.io/dropped": "x"}, "annotations": {"rl.qwen35.io/hash": "of the earlier release"}}
    dropped: dict[str, Any] = {"data": {"dropped.yaml": "x"}, "metadata": marks}
    live_training.patch(live_training.path("configmaps", "demo-config"), {"data": {"theirs": "kept"}})
    if operation == "an apply":
        own = ("apiVersion", "kind", "data")
        earlier = {name: before[name] for name in own} | {"metadata": {"name": "demo-config"}}
        earlier["data"] = before["data"] | dropped["data"]
        for part, added in marks.items():
            earlier["metadata"][part] = before["metadata"][part] | added
        live_training.plane.api.request("PATCH", f"{path}&force=true", earlier, content=APPLY)
    else:
        live_training.patch(path, dropped)

    def is_removed() -> bool:
        now = live_training.get("configmaps", "demo-config")
        assert now["data"]["theirs"] == "kept"
        return "dropped.yaml" not in now["data"] and "rl.qwen35.io/dropped" not in now["metadata"]["labels"]

    live_training.until(is_removed, "what the release does not write is gone")


def test_a_config_map_that_somebody_made_immutable_is_created_again(live_training: LiveTraining):
    begun(live_training)
    first = live_training.get("configmaps", "demo-control")["metadata"]["uid"]
    live_training.patch(live_training.path("configmaps", "demo-control"), {"immutable": True})
    live_training.scale(3)

    def has_size() -> bool:  # the operator deletes the object before it creates another
        made = live_training.find("configmaps", "demo-control")
        return made is not None and json.loads(made["data"]["control.json"])["rolloutNodes"] == 3

    live_training.until(has_size, "the trainer gets the size")
    assert live_training.get("configmaps", "demo-control")["metadata"]["uid"] != first
    live_training.until_pods("rollout", 3)


def test_the_trainers_messages_are_left_alone(live_training: LiveTraining):
    begun(live_training)
    path = live_training.path("configmaps", "demo-progress")
    text = live_training.get("configmaps", "demo-progress")["data"]["progress.json"]
    live_training.patch(path, {"data": {"more": "x"}} | FOREIGN)
    live_training.plane.wait(30)
    now = live_training.get("configmaps", "demo-progress")
    assert now["data"] == {"progress.json": text, "more": "x"}
    assert json.loads(text)["state"] == "Running"
