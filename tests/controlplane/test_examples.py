"""`kubectl apply` of an example gives exactly the golden children, and those of all examples are admitted."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen35_trainer import __version__
from tests.controlplane.live_training import CHILDREN, LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.testbed.control_plane import ControlPlane

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
GOLDEN = REPOSITORY / "tests" / "operator" / "desired" / "golden"
PLACEHOLDER = "00000000-0000-0000-0000-000000000000"
DRY = "?dryRun=All&fieldValidation=Strict"
HASH = "rl.qwen35.io/hash"
SERVER_SET = ("creationTimestamp", "finalizers", "generation", "managedFields", "resourceVersion", "uid")


def test_an_example_gives_exactly_the_golden_children(
    control_plane: ControlPlane, operator: OperatorProcess, namespace: str
):
    """One of them: that the operator writes what the builder builds does not depend on what is in it."""
    example = REPOSITORY / "examples" / "tiny-grpo.yaml"
    live_training = LiveTraining(control_plane, namespace, "tiny-grpo")
    live_training.kubectl("apply", f"--filename={example}")
    live_training.until_job()
    wanted = [
        as_made(live_training, item) for item in golden(live_training, example, live_training.body["metadata"]["uid"])
    ]
    children = [item for kind in CHILDREN for item in live_training.mine(kind)]
    assert by_name(children) == by_name(wanted)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_and_its_golden_children_are_admitted_as_they_are_written(
    control_plane: ControlPlane, namespace: str, example: Path
):
    """Strictly: no field is unknown, and none has a value that the API server refuses."""
    manifest = yaml.safe_load(example.read_text())
    live_training = LiveTraining(control_plane, namespace, manifest["metadata"]["name"])
    control_plane.api.post(live_training.path("qwen35trainings", None) + DRY, manifest)
    children = golden(live_training, example, PLACEHOLDER)
    assert {item["kind"] for item in children} >= {"RayJob", "ConfigMap", "NetworkPolicy"}
    for child in children:
        made = control_plane.api.post(live_training.path(plural_of(child), None) + DRY, child)
        assert by_name([made]).keys() == by_name([child]).keys()


def golden(live_training: LiveTraining, example: Path, uid: str) -> list[dict[str, Any]]:
    """The golden children of the example as a training of this namespace has them."""
    placeholders = {
        PLACEHOLDER: uid,
        PLACEHOLDER[:8]: uid[:8],
        "namespace: default": f"namespace: {live_training.namespace}",
        "value: default": f"value: {live_training.namespace}",
        ":VERSION": f":{__version__}",
    }
    text = (GOLDEN / example.name).read_text()
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    return list(yaml.safe_load_all(text))


def as_made(live_training: LiveTraining, manifest: dict[str, Any]) -> dict[str, Any]:
    """The object as the API server would make it, with all defaults, had it another name."""
    name = manifest["metadata"]["name"]
    copy = manifest | {"metadata": manifest["metadata"] | {"name": f"{name}-copy"}}
    made = live_training.plane.api.post(live_training.path(plural_of(manifest), None) + DRY, copy)
    made["metadata"]["name"] = name
    return dict(made)


def plural_of(manifest: dict[str, Any]) -> str:
    (plural,) = (item for item in CHILDREN if item.rstrip("s").replace("ie", "y") == manifest["kind"].lower())
    return plural


def by_name(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{kind_of(item)} {item['metadata']['name']}": said(item) for item in objects}


def kind_of(manifest: dict[str, Any]) -> str:
    """Lists do not say the kind of their items."""
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def said(manifest: dict[str, Any]) -> dict[str, Any]:
    """All that the object says, but for what the server, KubeRay and the trainer add."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in SERVER_SET}
    for group in manifest.get("spec", {}).get("rayClusterSpec", {}).get("workerGroupSpecs", []):
        group.pop("scaleStrategy", None)  # KubeRay writes the job again, with empty fields
    # The golden hash is that of the placeholder.
    metadata["annotations"] = {key: value for key, value in metadata.get("annotations", {}).items() if key != HASH}
    rest = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata", "status")}
    return rest | {"metadata": metadata}
