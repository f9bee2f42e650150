"""The typed fields of pod templates: those of Kubernetes, merged as the operator merges them, and nothing that could run is refused."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes import client

from qwen35_operator.api import crd
from qwen35_operator.api.pod_template_schema import POD_TEMPLATE
from qwen35_operator.desired.pod_overrides import shape
from qwen35_operator.desired.pod_overrides.merge import MERGE_KEYS
from tests.controlplane.pod_templates import FRAGMENTS

REPOSITORY = Path(__file__).parents[3]
SCHEMA: dict[str, Any] = {"type": "object", "properties": POD_TEMPLATE}
NODES = {path: node for path, node in crd.fields(SCHEMA) if path}
KINDS = {"str": "string", "int": "integer", "bool": "boolean"}


def names(path: str) -> tuple[str, ...]:
    """A path as MERGE_KEYS and the tables of shape.py spell it: without the positions in lists."""
    return tuple(path.replace("[]", "").split("."))


def client_types(model: str) -> dict[str, str]:
    """The fields of a model of the official client, by their names in manifests, and their types."""
    kind = getattr(client, model)
    return {kind.attribute_map[name]: of for name, of in kind.openapi_types.items()}


def assert_fields_are_those_of(model: str, node: dict[str, Any], path: str) -> None:
    types = client_types(model)
    for name, inside in node.get("properties", {}).items():
        here, of = f"{path}.{name}", types[name]
        listed = re.fullmatch(r"[lL]ist\[(\w+)\]", of)
        if listed:
            assert inside["type"] == "array", here
            assert_fields_are_those_of(listed[1], inside["items"], here)
        elif re.fullmatch(r"[dD]ict[(\[]str, \w+[)\]]", of):
            assert inside["type"] == "object", here
            values = inside["additionalProperties"]
            assert values.get("type") == "string" or values["x-kubernetes-int-or-string"], here
        elif of.startswith("V1"):
            assert inside["type"] == "object", here
            assert_fields_are_those_of(of, inside, here)
        else:
            assert inside["type"] == KINDS[of], here


def test_every_field_is_one_of_kubernetes_and_has_its_type():
    assert_fields_are_those_of("V1PodTemplateSpec", SCHEMA, "")


def test_lists_have_the_keys_by_which_the_operator_merges_them():
    keyed = {
        names(path): tuple(node.get("x-kubernetes-list-map-keys", ()))
        for path, node in NODES.items()
        if node.get("type") == "array"
    }
    assert keyed.pop(("spec", "tolerations")) == ()
    assert keyed.items() <= MERGE_KEYS.items()
    for path, node in NODES.items():
        if keys := node.get("x-kubernetes-list-map-keys"):
            assert NODES[f"{path}[]"]["required"] == keys


def test_null_and_unknown_fields_reach_the_operator():
    """The API server drops null where a field is not nullable; items and keys of merged lists cannot be."""
    for path, node in NODES.items():
        parent, _, name = path.rpartition(".")
        key = name in NODES.get(parent, {}).get("required", ())
        assert node.get("nullable", False) == (not key and not path.endswith("[]")), path
        if node.get("type") == "object" and "additionalProperties" not in node:
            assert node["x-kubernetes-preserve-unknown-fields"] is True, path


def problems(template: Any) -> list[str]:
    """What is wrong with a template by the schema."""

    def plain(node: dict[str, Any]) -> dict[str, Any]:
        """The node in JSON Schema's own keywords."""
        result = {key: node[key] for key in ("type", "required") if key in node}
        if node.get("x-kubernetes-int-or-string"):
            result["type"] = ["integer", "string"]
        if node.get("nullable"):
            kinds = result["type"] if isinstance(result["type"], list) else [result["type"]]
            result["type"] = [*kinds, "null"]
        if "properties" in node:
            result["properties"] = {name: plain(inside) for name, inside in node["properties"].items()}
        return result | {key: plain(node[key]) for key in ("items", "additionalProperties") if key in node}

    return [error.json_path for error in jsonschema.Draft4Validator(plain(SCHEMA)).iter_errors(template)]


@pytest.mark.parametrize("template", FRAGMENTS, ids=range(len(FRAGMENTS)))
def test_what_people_set_is_accepted(template):
    assert problems(template) == []


def documented() -> list[dict[str, Any]]:
    """The templates in the examples, the golden manifests and the documents."""
    files = [*REPOSITORY.glob("examples/**/*.yaml"), *REPOSITORY.glob("tests/operator/desired/manifests/**/*.yaml")]
    texts = [file.read_text() for file in files]
    for page in REPOSITORY.glob("docs/**/*.md"):
        texts += re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    templates: list[dict[str, Any]] = []
    for text in texts:
        for document in yaml.safe_load_all(text):
            templates += _templates(document)
    return templates


def _templates(document: Any) -> list[dict[str, Any]]:
    if not isinstance(document, dict):
        return []
    spec = document.get("spec") if isinstance(document.get("spec"), dict) else document
    pods = spec.get("pods")
    return [pods[pool] for pool in ("head", "rollout", "train") if pool in pods] if isinstance(pods, dict) else []


def test_what_is_documented_is_accepted():
    templates = documented()
    assert len(templates) >= 5
    assert [problems(template) for template in templates] == [[]] * len(templates)


WRONG: list[dict[str, Any]] = [
    {"metadata": "a"},
    {"metadata": {"labels": {"tier": 1}}},
    {"metadata": {"annotations": ["a"]}},
    {"spec": []},
    {"spec": {"nodeSelector": {"gpu": True}}},
    {"spec": {"tolerations": {"key": "a"}}},
    {"spec": {"tolerations": ["a"]}},
    {"spec": {"affinity": "zone"}},
    {"spec": {"securityContext": "none"}},
    {"spec": {"volumes": [{"emptyDir": {}}]}},
    {"spec": {"imagePullSecrets": ["registry"]}},
    {"spec": {"containers": {"name": "ray"}}},
    {"spec": {"containers": [{"image": "a"}]}},
    {"spec": {"containers": [{"name": "ray", "env": {"A": "b"}}]}},
    {"spec": {"containers": [{"name": "ray", "resources": []}]}},
    {"spec": {"containers": [{"name": "ray", "volumeMounts": [{"name": "a"}]}]}},
    {"spec": {"initContainers": [{"name": 5}]}},
]


@pytest.mark.parametrize("template", WRONG, ids=str)
def test_what_the_schema_refuses_the_operator_refused_before(template):
    assert problems(template)
    assert list(shape.problems(template, "spec.pods.train"))


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"priorityClassName": 5}},
        {"spec": {"terminationGracePeriodSeconds": "5"}},
        {"spec": {"tolerations": [{"key": "a", "operator": True}]}},
        {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"cpu": 0.5}}}]}},
    ],
    ids=str,
)
def test_types_that_the_definition_of_kuberay_refuses_are_refused_earlier(template):
    """A RayJob with such a pod template was refused, so that these trainings never ran."""
    assert problems(template)


def test_all_three_templates_have_the_schema():
    pods = crd.schema()["properties"]["spec"]["properties"]["pods"]["properties"]
    for pool in ("head", "rollout", "train"):
        assert pods[pool]["properties"] == POD_TEMPLATE
        assert pods[pool]["maxProperties"] == 2


def test_a_rendered_definition_shares_no_part_with_the_constant():
    before = deepcopy(POD_TEMPLATE)
    crd.schema()["properties"]["spec"]["properties"]["pods"]["properties"]["head"]["properties"].clear()
    assert before == POD_TEMPLATE
