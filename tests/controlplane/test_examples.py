"""`kubectl apply` of every example gives exactly the golden children."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen35_trainer import __version__
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story import CHILDREN, Story
from tests.testbed.control_plane import ControlPlane

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
GOLDEN = REPOSITORY / "tests" / "operator" / "desired" / "golden"
PLACEHOLDER = "00000000-0000-0000-0000-000000000000"
HASH = "rl.qwen35.io/hash"
SERVER_SET = ("creationTimestamp", "finalizers", "generation", "managedFields", "resourceVersion", "uid")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_gives_exactly_the_golden_children(
    control_plane: ControlPlane, operator: OperatorProcess, namespace: str, example: Path
):
    name = yaml.safe_load(example.read_text())["metadata"]["name"]
    story = Story(control_plane, namespace, name)
    story.kubectl("apply", f"--filename={example}")
    story.until_job()

    uid = story.body["metadata"]["uid"]
    placeholders = {
        PLACEHOLDER: uid,
        PLACEHOLDER[:8]: uid[:8],
        "namespace: default": f"namespace: {namespace}",
        "value: default": f"value: {namespace}",
        ":VERSION": f":{__version__}",
    }
    golden = (GOLDEN / example.name).read_text()
    for placeholder, value in placeholders.items():
        golden = golden.replace(placeholder, value)
    wanted = [as_made(story, one) for one in yaml.safe_load_all(golden)]
    found = [one for kind in CHILDREN for one in story.mine(kind)]
    assert by_name(found) == by_name(wanted)


def as_made(story: Story, manifest: dict[str, Any]) -> dict[str, Any]:
    """The object as the API server would make it, with all defaults, had it another name."""
    name = manifest["metadata"]["name"]
    aside = manifest | {"metadata": manifest["metadata"] | {"name": f"{name}-aside"}}
    text = json.dumps(aside)
    made = json.loads(story.kubectl("create", "--dry-run=server", "--output=json", "--filename=-", input=text))
    made["metadata"]["name"] = name
    return dict(made)


def by_name(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{kind_of(one)} {one['metadata']['name']}": said(one) for one in objects}


def kind_of(manifest: dict[str, Any]) -> str:
    """Lists do not say the kind of their items."""
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def said(manifest: dict[str, Any]) -> dict[str, Any]:
    """All that the object says, but for what the server, KubeRay and the trainer add."""
    about = {key: value for key, value in manifest["metadata"].items() if key not in SERVER_SET}
    for group in manifest.get("spec", {}).get("rayClusterSpec", {}).get("workerGroupSpecs", []):
        group.pop("scaleStrategy", None)  # KubeRay writes the job anew, with what is empty
    # The golden hash is that of the placeholder.
    about["annotations"] = {key: value for key, value in about.get("annotations", {}).items() if key != HASH}
    rest = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata", "status")}
    return rest | {"metadata": about}
