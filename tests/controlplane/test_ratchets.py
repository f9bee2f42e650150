"""Objects that are older than a rule of the definition can be changed in other ways, on the real API server."""

from copy import deepcopy
from typing import Any

from qwen35_operator.api import crd
from qwen35_operator.api.rules import RULES
from tests.controlplane.test_changes import SPEC
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane

GROUP = "older.qwen35.io"
MERGE = "application/merge-patch+json"
LANE = {"nodes": 1, "tensorParallel": 4, "afterTokens": 4096}
OLDER = SPEC | {
    "rollout": {"nodes": 3, "minNodes": 1, "tensorParallel": 4, "stragglerLane": LANE},
    "algorithm": {"loss": {"type": "SAPO"}},
}
"""A lane that fills minNodes, is not larger, begins above maxResponseTokens, and has Torch replicas on accelerators; the loss
SAPO with the default correction, where its gate does nothing."""
PATHS = (
    "spec.rollout.minNodes",
    "spec.rollout.stragglerLane.tensorParallel",
    "spec.rollout.stragglerLane.afterTokens",
    "spec.rollout.stragglerLane",
    "spec.algorithm.correction.type",
)
OLDER_WITH_VLLM = SPEC | {
    "rollout": {"nodes": 2, "engine": "VLLM", "temperature": 0.005},
    "evaluation": {"temperature": 0.005},
}
"""Temperatures that vLLM raises."""
PATHS_WITH_VLLM = ("spec.rollout.temperature", "spec.evaluation.temperature")


def test_the_older_trainings_break_every_rule_that_ratchets() -> None:
    ratcheting = {f"{place}{rule.field}" for place, rules in RULES.items() for rule in rules if rule.ratchets}
    assert ratcheting == {*PATHS, *PATHS_WITH_VLLM}


def definition(*, ratchets: bool) -> dict[str, Any]:
    """The definition in a group of its own. ratchets: whether it has the rules that ratchet."""
    rendered = deepcopy(crd.render())
    rendered["metadata"]["name"] = f"{rendered['spec']['names']['plural']}.{GROUP}"
    rendered["spec"]["group"] = GROUP
    del rendered["spec"]["names"]["shortNames"], rendered["spec"]["names"]["categories"]
    schema = rendered["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for _, node in [] if ratchets else crd.fields(schema):
        if rules := node.get("x-kubernetes-validations"):
            node["x-kubernetes-validations"] = [rule for rule in rules if "optionalOldSelf" not in rule]
    return rendered


def served(plane: ControlPlane, path: str) -> bool:
    """Whether the API server lists the kind. It answers 404 or 429 while it reads the definition."""
    try:
        plane.api.get(path)
    except Refused:
        return False
    return True


def patched(plane: ControlPlane, path: str, spec: dict[str, Any]) -> str | None:
    """The message with which the change is refused; None if it is made."""
    try:
        plane.api.request("PATCH", path, {"spec": spec}, content=MERGE)
    except Refused as refused:
        return refused.message
    return None


def test_an_older_training_can_be_suspended_resized_and_corrected(
    control_plane: ControlPlane, namespace: str, eventually: Any
) -> None:
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    older = control_plane.api.post(definitions, definition(ratchets=False))
    this = f"{definitions}/{older['metadata']['name']}"
    trainings = f"/apis/{GROUP}/v1alpha1/namespaces/{namespace}/qwen35trainings"
    envelope = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "Qwen35Training"}
    try:
        eventually(lambda: served(control_plane, trainings), "the API server serves the kind")
        for name, spec in (("older", OLDER), ("older-with-vllm", OLDER_WITH_VLLM)):
            control_plane.api.post(trainings, envelope | {"metadata": {"name": name}, "spec": spec})
        control_plane.api.request("PATCH", this, {"spec": definition(ratchets=True)["spec"]}, content=MERGE)

        def refusal(spec: dict[str, Any]) -> str:
            try:
                new = envelope | {"metadata": {"name": "new"}, "spec": spec}
                control_plane.api.post(f"{trainings}?dryRun=All", new)
            except Refused as refused:
                return refused.message if refused.status == 422 else ""
            return ""

        eventually(lambda: refusal(OLDER), "the API server has the new rules")
        for spec, paths in ((OLDER, PATHS), (OLDER_WITH_VLLM, PATHS_WITH_VLLM)):
            assert all(f"{path}: Invalid value" in refusal(spec) for path in paths), refusal(spec)
        path = f"{trainings}/older"
        assert patched(control_plane, path, {"rollout": {"nodes": 4}}) is None
        assert patched(control_plane, path, {"suspend": True}) is None
        # From here on, nothing takes the correction back.
        assert patched(control_plane, path, {"rollout": {"minNodes": 2}}) is None
        again = patched(control_plane, path, {"rollout": {"minNodes": 1}})
        assert again is not None
        assert "minNodes must be more than stragglerLane.nodes" in again
        assert patched(control_plane, path, {"algorithm": {"correction": {"type": "None"}}}) is None
        again = patched(control_plane, path, {"algorithm": {"correction": {"type": "TokenTIS"}}})
        assert again is not None
        assert "the gate of loss SAPO does nothing" in again
        path = f"{trainings}/older-with-vllm"
        assert patched(control_plane, path, {"suspend": True}) is None
        assert patched(control_plane, path, {"rollout": {"temperature": 0.02}}) is None
        again = patched(control_plane, path, {"rollout": {"temperature": 0.005}})
        assert again is not None
        assert "With engine VLLM temperature must be at least 0.01" in again
    finally:
        control_plane.api.request("DELETE", this)
