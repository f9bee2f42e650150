"""Every rule of the operator's role is used, by stories whose operator has exactly these rules."""

import pytest

from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from tests.controlplane import operator_process
from tests.controlplane.live_training import LiveTraining
from tests.virtual.operators import VirtualOperator
from tests.virtual.plane import VirtualPlane

pytestmark = pytest.mark.worlds("memory", only=True)

type Right = tuple[str, str, str]
"""API group, resource and verb."""

NEVER_REQUESTED: dict[Right, str] = {
    (
        "rl.qwen35.io",
        "qwen35trainings/finalizers",
        "update",
    ): "clusters that enforce OwnerReferencesPermissionEnforcement",
    (
        "",
        "configmaps",
        "update",
    ): "the Role of the release before contains it, and the operator can bind only what it has",
}
"""Rights that the API server demands for other requests than those of this verb, with what demands them."""


def granted() -> set[Right]:
    return {
        (group, resource, verb)
        for rule in operator_process.rules()
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


OWNED = ("configmaps/demo-progress", "roles/demo-trainer", "serviceaccounts/demo-trainer", "rolebindings/demo-trainer")
FOREIGN = {"metadata": {"name": "demo-1"}, "spec": {"entrypoint": "", "clusterSelector": {"ray.io/cluster": "none"}}}


def test_every_right_is_used_and_none_is_missing(live_training: LiveTraining, operator: VirtualOperator):
    """A training's whole life, with a name that is taken, a changed spec, nodes that do not answer, and labels that somebody changes."""
    live_training.plane.api.post(live_training.path("rayjobs", None), FOREIGN)
    live_training.apply(cleanupSecondsAfterFinished=5, checkpoint={"graceSeconds": 5}, disruptionBudget="HeadAndTrain")
    live_training.until_condition("Accepted", "False", "NameTaken")
    live_training.plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    live_training.until_pods("rollout", 2)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    live_training.scale(4)
    live_training.until_pods("rollout", 4)
    live_training.edit(suspend=True)
    live_training.until_state("Suspended")
    live_training.edit(suspend=False, train={"updates": 7})
    live_training.until_pods("rollout", 4)
    plane = live_training.plane
    assert isinstance(plane, VirtualPlane)
    with plane.kubelets_away():
        plane.api.request("DELETE", live_training.path("rayjobs", "demo-2"))
        live_training.until_condition("Reconciling", "True", "PodsNotEnded")
    live_training.until_pods("rollout", 4)
    for child in (*OWNED, "networkpolicies/demo", "poddisruptionbudgets/demo-disruptions"):
        plural, name = child.split("/")
        live_training.patch(live_training.path(plural, name), {"metadata": {"labels": {"rl.qwen35.io/training": "x"}}})
    live_training.until(lambda: len(live_training.mine("networkpolicies")) == 1, "it has its label again")
    live_training.report("Succeeded", attempt=3, message="enough")
    live_training.until_state("Succeeded")
    live_training.until(lambda: not live_training.mine("configmaps"), "its children are gone")
    live_training.patch(live_training.path("qwen35trainings"), {"metadata": {"finalizers": [LAST_CHECKPOINT]}})
    live_training.delete()
    live_training.until(lambda: live_training.find("qwen35trainings", "demo") is None, "it is gone")

    lease = {("coordination.k8s.io", "leases", verb) for verb in ("get", "update")}
    assert operator.rights.used - lease <= granted()
    assert granted() - operator.rights.used == set(NEVER_REQUESTED)
    assert operator.refused_requests() == {}
