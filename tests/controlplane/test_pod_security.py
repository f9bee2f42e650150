"""The chart's policy for spec.pods on a real API server, control by control, next to Kubernetes' own admission of the resulting pods."""

import secrets
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import pod_templates
from qwen35_trainer.manifest import parse_spec
from tests.controlplane import chart_release
from tests.controlplane.live_training import GROUP, SPEC, LiveTraining
from tests.controlplane.pod_security_cases import CONTROLS, Control, Document, pod, ray_context
from tests.patience import PATIENCE
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane

LEVELS = ("privileged", "baseline", "restricted")
LABEL = "rl.qwen35.io/pod-security"
VIOLATION = pod(hostIPC=True)
"""What every level but privileged refuses."""


@pytest.fixture(scope="module")
def namespaces(control_plane: ControlPlane) -> Iterator[dict[str, str]]:
    """A namespace of each level, for our policy and for Kubernetes, while the policy acts; `""` has no label of ours."""
    with chart_release.installed(control_plane):
        names = {level: namespace(control_plane, level) for level in (*LEVELS, "", "unheard-of")}
        until(lambda: refusal(control_plane, names["baseline"], VIOLATION), "the policy acts")
        yield names


def namespace(plane: ControlPlane, level: str) -> str:
    """A fresh namespace of this level, that takes pods."""
    name = f"security-{secrets.token_hex(4)}"
    labels = {LABEL: level} if level else {}
    labels |= {"pod-security.kubernetes.io/enforce": level} if level in LEVELS else {}
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    until(lambda: plane.api.exists(f"/api/v1/namespaces/{name}/serviceaccounts/default"), "it has its account")
    return name


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.1)


def refused(plane: ControlPlane, path: str, body: Document) -> str | None:
    """Why the API server refuses to create an object, which it does not carry out; None if it would."""
    try:
        plane.api.post(f"{path}?dryRun=All", body)
    except Refused as error:
        return error.message
    return None


def spec_with(change: Document) -> dict[str, Any]:
    return deepcopy(SPEC) | {"pods": {"train": change}}


def refusal(plane: ControlPlane, namespace: str, change: Document) -> str | None:
    """Why a training with this change of its train pods is refused. No training of the namespace may have its name."""
    body = {"apiVersion": GROUP.removeprefix("/apis/"), "kind": "Qwen35Training", "metadata": {"name": "only-proposed"}}
    message = refused(plane, f"{GROUP}/namespaces/{namespace}/qwen35trainings", body | {"spec": spec_with(change)})
    assert message is None or "denied request: spec.pods: " in message, message
    return message


def violates(plane: ControlPlane, namespace: str, change: Document) -> bool | None:
    """Whether Kubernetes refuses the pod that the operator would describe, for its security; None if it is invalid."""
    spec, problems = parse_spec(spec_with(change))
    assert spec is not None, problems
    owner = TrainingResource("demo", namespace, "00000000-0000-0000-0000-000000000000", 1, spec)
    template = pod_templates.template(owner, "trainer:1", "train", 1)
    body = {"metadata": template["metadata"] | {"name": "demo"}, "spec": template["spec"]}
    message = refused(plane, f"/api/v1/namespaces/{namespace}/pods", body)
    if message is None:
        return False
    return True if "violates PodSecurity" in message else None


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.id)
def test_a_control_refuses_from_its_level_on_what_kubernetes_refuses_in_pods(
    control_plane: ControlPlane, namespaces: dict[str, str], control: Control
):
    own, below = (namespaces[LEVELS[LEVELS.index(control.level.lower()) - step]] for step in (0, 1))
    compared = []
    for change in control.refused:
        message = refusal(control_plane, own, change)
        assert message is not None, change
        assert control.level in message
        assert own in message
        assert refusal(control_plane, below, change) is None, change
        compared += [
            violates(control_plane, own, change) is not False,
            violates(control_plane, below, change) is not True,
        ]
    for change in control.allowed:
        assert refusal(control_plane, own, change) is None, change
        compared.append(violates(control_plane, own, change) is not True)
    assert all(compared), (control, compared)


def test_most_refusals_are_those_of_kubernetes_itself(control_plane: ControlPlane, namespaces: dict[str, str]):
    """Kubernetes refuses two earlier, because such a pod is invalid: of Windows on Linux, or unmasked in the node's user namespace."""
    verdicts = {
        control.id: {
            violates(control_plane, namespaces[control.level.lower()], change) for change in control.refused[:1]
        }
        for control in CONTROLS
    }
    assert {name for name, verdict in verdicts.items() if verdict != {True}} == {"windowsHostProcess", "procMount"}


def test_without_a_label_the_level_is_that_of_the_chart_and_an_unknown_one_counts_as_restricted(
    control_plane: ControlPlane, namespaces: dict[str, str]
):
    root = ray_context(runAsUser=0)
    assert refusal(control_plane, namespaces[""], VIOLATION)
    assert refusal(control_plane, namespaces[""], root) is None
    assert refusal(control_plane, namespaces["unheard-of"], root)
    assert refusal(control_plane, namespaces["unheard-of"], {}) is None


def test_trainings_from_before_a_stricter_level_can_be_changed_and_deleted_but_not_made_worse(
    control_plane: ControlPlane, namespaces: dict[str, str]
):
    name = namespace(control_plane, "privileged")
    live_training = LiveTraining(control_plane, name).apply(pods={"train": VIOLATION})
    stricter = {"metadata": {"labels": {LABEL: "restricted"}}}
    live_training.patch(f"/api/v1/namespaces/{name}", stricter)
    until(lambda: refusal(control_plane, name, VIOLATION), "the level is stricter")
    live_training.edit(suspend=True)
    live_training.scale(3)
    live_training.patch(live_training.path("qwen35trainings"), {"metadata": {"finalizers": ["example.com/keep"]}})
    with pytest.raises(Refused, match="Host Namespaces: hostPID, hostIPC"):
        live_training.edit(pods={"train": {"spec": {"hostPID": True}}})
    live_training.edit(pods={"train": {"spec": None}})
    live_training.delete()
    live_training.patch(live_training.path("qwen35trainings"), {"metadata": {"finalizers": None}})
    assert live_training.find("qwen35trainings", "demo") is None
