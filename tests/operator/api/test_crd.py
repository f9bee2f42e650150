"""The custom resource definition is structural, bounded, current, and says what the models say."""

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel

from qwen35_operator.api import crd, v1alpha1
from qwen35_operator.status.times import at, rfc3339
from qwen35_trainer.manifest import Manifest, TrainingSpec, fields

REPOSITORY = Path(__file__).parents[3]
SCHEMA = crd.schema()
NODES = dict(crd.fields(SCHEMA))
# gym.config is the one place where values of several types are let through, for the operator's own check.
UNTYPED = {
    "spec.data.train[].gym.config{}",
    "spec.data.validation[].gym.config{}",
    "spec.rollout.vllm.extraArguments{}",
    "spec.train.overrideTransformerConfig{}",
}
# Parts of pod templates: test_pod_template_schema.py is about their fields.
TEMPLATES = {f"spec.pods.{pool}" for pool in ("head", "rollout", "train")}
IN_TEMPLATES = {path for path in NODES for template in TEMPLATES if path.startswith(f"{template}.")}
BY_MODE = {
    f"spec.async.{name}"
    for name in ("stalenessThreshold", "maxVersionLag", "onMissedDeadline", "partialRollout", "adaptiveDispatch")
}
VALID = {
    "apiVersion": "rl.qwen35.io/v1alpha1",
    "kind": "Qwen35Training",
    "metadata": {"name": "tiny"},
    "spec": {
        "model": {"name": "tiny", "source": {"random": {}}},
        "data": {
            "train": [
                {
                    "name": "sums",
                    "gym": {"task": "chain_sum", "size": 64, "config": {"terms": 3, "any": True, "t": "x"}},
                },
                {"name": "math", "files": {"paths": ["a.jsonl"]}},
            ]
        },
        "rewards": [{"type": "Gym", "weight": 2}, {"type": "Math", "extract": "(.*)"}],
        "rollout": {"nodes": 3, "stragglerLane": {"nodes": 1, "tensorParallel": 2, "afterTokens": 64}},
        "train": {"updates": 10, "optimizer": {"learningRate": 1e-6}},
        "async": {"stalenessThreshold": 1, "maxVersionLag": 4},
        "failurePolicy": {"rules": [{"name": "oom", "action": "Fail", "onExitCodes": [137]}]},
    },
}
# Paths of values, each with one that the models and the schema refuse.
REFUSED = [
    ("spec", "seed", "3"),
    ("spec", "seed", -1),
    ("spec", "mode", "Async"),
    ("spec", "suspend", "false"),
    ("spec.train", "updates", 1.5),
    ("spec.train", "nodes", 0),
    ("spec.train.optimizer", "learningRate", 0),
    ("spec.train.optimizer", "learningRate", "1e-6"),
    ("spec.rollout", "nodes", 2000),
    ("spec.rollout.stragglerLane", "nodes", None),
    ("spec.model", "name", "a b"),
    ("spec.model", "name", ""),
    ("spec.model", "source", "path"),
    ("spec.data", "train", []),
    ("spec.data", "train", {}),
    ("spec", "rewards", [{"weight": 1}]),
    ("spec", "rewards", [{"type": "Function", "function": "no-colon"}]),
    ("spec.failurePolicy", "rules", [{"name": "a", "action": "Fail", "onExitCodes": [256]}]),
]


def test_the_definition_in_the_repository_is_current():
    current = (REPOSITORY / "crds" / "rl.qwen35.io_qwen35trainings.yaml").read_text()
    assert current == crd.text(), "run: python -m qwen35_operator.api.crd > crds/rl.qwen35.io_qwen35trainings.yaml"


def test_rendering_gives_the_same_text_each_time():
    assert crd.text() == crd.text()
    assert "&id" not in crd.text()


def test_every_node_is_structural_and_bounded():
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "title", "const"}
    for path, node in NODES.items():
        assert not forbidden & node.keys(), path
        if path in IN_TEMPLATES:
            continue
        if path in UNTYPED:
            assert node["x-kubernetes-preserve-unknown-fields"] is True, path
            continue
        if path in TEMPLATES:
            assert (node["type"], node["x-kubernetes-preserve-unknown-fields"]) == ("object", True), path
            continue
        assert "x-kubernetes-preserve-unknown-fields" not in node, path
        assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}, path
        match node["type"]:
            case "array":
                assert node["maxItems"] <= 1024, path
                assert node["x-kubernetes-list-type"] in {"map", "atomic"}, path
            case "string":
                assert "enum" in node or "maxLength" in node, path
            case "object" if "additionalProperties" in node:
                assert node["maxProperties"] <= 1024, path
            case "object" if path != "metadata":
                assert node["properties"], path


def test_numbers_and_times_have_the_formats_of_kubernetes():
    """int32 only where both bounds are: a larger value than the format holds would be refused by generated clients."""
    for path, node in NODES.items():
        low, high = node.get("minimum"), node.get("maximum")
        match node.get("type"):
            case "number":
                assert node["format"] == "double", path
            case "integer":
                small = None not in (low, high) and low >= -(2**31) and high < 2**31
                assert node["format"] == ("int32" if small else "int64"), path
            case _:
                assert node.get("format") in (None, "date-time"), path
    times = {path for path, node in NODES.items() if node.get("format") == "date-time"}
    assert times == {path for path in NODES if path.startswith("status.") and path.endswith(("ime", ".activeSince"))}


def test_the_times_that_the_operator_writes_have_the_format():
    written = rfc3339(at(0.5)), rfc3339(at(1.8e9))
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text) for text in written)


def test_client_side_apply_can_store_the_definition():
    """`kubectl apply` writes the definition into an annotation, and all annotations together have at most 256 KiB."""
    assert len(json.dumps(crd.render(), separators=(",", ":")).encode()) < 192 * 1024


def test_trainings_are_selected_by_mode_and_state():
    (version,) = crd.render()["spec"]["versions"]
    paths = [field["jsonPath"] for field in version["selectableFields"]]
    assert paths == [".spec.mode", ".status.state"]
    assert all(NODES[path[1:]]["type"] == "string" for path in paths)


def test_every_field_has_a_description():
    fields_of_people = [path for path in NODES if path not in {"metadata"} and path[-2:] not in {"[]", "{}"}]
    assert fields_of_people
    for path in fields_of_people:
        assert NODES[path]["description"].endswith("."), path


def test_items_with_names_are_keyed_by_them():
    keyed = {
        path: node["x-kubernetes-list-map-keys"]
        for path, node in NODES.items()
        if "x-kubernetes-list-map-keys" in node and path not in IN_TEMPLATES
    }
    assert keyed == {
        "spec.data.train": ["name"],
        "spec.data.validation": ["name"],
        "spec.failurePolicy.rules": ["name"],
        "spec.pods.env": ["name"],
        "status.conditions": ["type"],
        "status.pools": ["name"],
        "status.attempts": ["number"],
    }
    for path, keys in keyed.items():
        assert set(keys) <= set(NODES[f"{path}[]"]["required"])


def model_fields(path, model):
    for name, field in fields.fields(model).items():
        here = f"{path}.{name}"
        yield here, field
        inside, mark = fields.item(field.annotation), "[]"
        if inside is None:
            inside, mark = field.annotation, ""
        if (part := fields.section(inside)) is not None:
            yield from model_fields(here + mark, part)


MODEL_FIELDS = [*model_fields("spec", TrainingSpec), *model_fields("status", v1alpha1.TrainingStatus)]


def test_every_default_is_the_models_own():
    for path, field in MODEL_FIELDS:
        node = NODES[path]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if path in BY_MODE:
            assert "default" not in node, path
        elif isinstance(default, BaseModel):
            assert node["default"] == {}, path
            assert type(default)() == default, path
        elif default is None or default == {}:
            assert "default" not in node, path
        else:
            assert node["default"] == (list(default) if isinstance(default, tuple) else default), path
        assert node.get("nullable", False) == (path == "spec.algorithm.loss.dualClip"), path


def test_the_schema_has_exactly_the_fields_of_the_models():
    named = {path for path in NODES if path[-2:] not in {"[]", "{}"} and path.startswith(("spec.", "status."))}
    assert named - IN_TEMPLATES == {path for path, _ in MODEL_FIELDS}


def test_only_what_depends_on_the_mode_has_no_default_in_stored_objects():
    without = {path for path, field in MODEL_FIELDS if "default" not in NODES[path] and field.default is not None}
    assert {path for path in without if path.startswith("spec.async")} == BY_MODE


def test_the_schema_is_one():
    jsonschema.Draft4Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    ("place", "name", "value", "fits"),
    [pytest.param("spec", "mode", "FullyAsync", True, id="valid"), *((*refused, False) for refused in REFUSED)],
)
def test_what_the_models_take_or_refuse_by_type_the_schema_does_too(place, name, value, fits):
    manifest = copy.deepcopy(VALID)
    here = manifest
    for key in place.split("."):
        here = here[key]
    here[name] = value
    assert (not list(jsonschema.Draft4Validator(SCHEMA).iter_errors(manifest))) == fits
    with nullcontext() if fits else pytest.raises(ValueError, match="validation error"):
        Manifest.model_validate(manifest)


def test_the_object_is_namespaced_named_and_scaled_by_rollout_nodes():
    spec = crd.render()["spec"]
    assert spec["scope"] == "Namespaced"
    assert spec["names"] == {
        "kind": "Qwen35Training",
        "listKind": "Qwen35TrainingList",
        "plural": "qwen35trainings",
        "singular": "qwen35training",
        "shortNames": ["q35"],
        "categories": ["rl"],
    }
    (version,) = spec["versions"]
    assert version["subresources"]["status"] == {}
    for path in version["subresources"]["scale"].values():
        assert path.removeprefix(".") in NODES


def test_columns_show_fields_that_exist_and_fit_a_terminal():
    (version,) = crd.render()["spec"]["versions"]
    columns = version["additionalPrinterColumns"]
    for column in columns:
        path = re.sub(r"\[\?\(.*?\)\]", "[]", column["jsonPath"].removeprefix("."))
        assert path.startswith("metadata.") or path in NODES
    # kubectl pads each column by three; a running training with a name of twelve.
    widest = {"Mode": len("FullyAsync"), "State": len("Running"), "Age": len("3d4h")}
    shown = [column["name"] for column in columns if column["priority"] == 0]
    assert sum(max(len(name), widest.get(name, 0)) for name in shown) + 3 * len(shown) + 12 <= 80
