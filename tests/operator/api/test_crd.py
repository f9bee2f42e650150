"""The custom resource definition is structural, bounded, current, and says what the models say."""

import copy
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel

from qwen35_operator.api import crd, v1alpha1
from qwen35_trainer.spec import Manifest, TrainingSpec, fields

REPOSITORY = Path(__file__).parents[3]
SCHEMA = crd.schema()
NODES = dict(crd.fields(SCHEMA))
# gym.config is the one place where values of several types are let through, for the operator's own check.
UNTYPED = {"spec.data.train[].gym.config{}", "spec.data.validation[].gym.config{}"}
# Parts of pod templates: the API server checks them when the RayJob is made from them.
TEMPLATES = {f"spec.pods.{pool}" for pool in ("head", "rollout", "train")}
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
        "rollout": {"nodes": 3, "lane": {"nodes": 1, "tensorParallel": 2, "afterTokens": 64}},
        "train": {"updates": 10, "optimizer": {"learningRate": 1e-6}},
        "async": {"stalenessThreshold": 1, "maxVersionLag": 4},
        "failurePolicy": {"rules": [{"name": "oom", "action": "Fail", "exitCodes": [137]}]},
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
    ("spec.rollout.lane", "nodes", None),
    ("spec.model", "name", "a b"),
    ("spec.model", "name", ""),
    ("spec.model", "source", "path"),
    ("spec.data", "train", []),
    ("spec.data", "train", {}),
    ("spec", "rewards", [{"weight": 1}]),
    ("spec", "rewards", [{"type": "Function", "function": "no-colon"}]),
    ("spec.failurePolicy", "rules", [{"name": "a", "action": "Fail", "exitCodes": [256]}]),
]


def test_the_definition_in_the_repository_is_current():
    current = (REPOSITORY / "crds" / "rl.qwen35.io_qwen35trainings.yaml").read_text()
    assert current == crd.text(), "run: python -m qwen35_operator.api.crd > crds/rl.qwen35.io_qwen35trainings.yaml"


def test_rendering_gives_the_same_text_each_time():
    assert crd.text() == crd.text()
    assert "&id" not in crd.text()


@pytest.mark.parametrize(("path", "node"), NODES.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_node_is_structural_and_bounded(path, node):
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "title", "const", "format"}
    assert not forbidden & node.keys()
    if path in UNTYPED:
        assert node["x-kubernetes-preserve-unknown-fields"] is True
        return
    if path in TEMPLATES:
        assert (node["type"], node["x-kubernetes-preserve-unknown-fields"]) == ("object", True)
        return
    assert "x-kubernetes-preserve-unknown-fields" not in node
    assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}
    match node["type"]:
        case "array":
            assert node["maxItems"] <= 1024
            assert node["x-kubernetes-list-type"] in {"map", "atomic"}
        case "string":
            assert "enum" in node or "maxLength" in node
        case "object" if "additionalProperties" in node:
            assert node["maxProperties"] <= 1024
        case "object" if path != "metadata":
            assert node["properties"]


@pytest.mark.parametrize("path", [path for path in NODES if path not in {"metadata"} and path[-2:] not in {"[]", "{}"}])
def test_every_field_has_a_description(path):
    assert NODES[path]["description"].endswith(".")


def test_items_with_names_are_keyed_by_them():
    keyed = {
        path: node["x-kubernetes-list-map-keys"] for path, node in NODES.items() if "x-kubernetes-list-map-keys" in node
    }
    assert keyed == {
        "spec.data.train": ["name"],
        "spec.data.validation": ["name"],
        "spec.failurePolicy.rules": ["name"],
        "spec.pods.environment": ["name"],
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


@pytest.mark.parametrize(("path", "field"), MODEL_FIELDS, ids=[path for path, _ in MODEL_FIELDS])
def test_every_default_is_the_models_own(path, field):
    node = NODES[path]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if path in BY_MODE:
        assert "default" not in node
    elif isinstance(default, BaseModel):
        assert node["default"] == {}
        assert type(default)() == default
    elif default is None or default == {}:
        assert "default" not in node
    else:
        assert node["default"] == (list(default) if isinstance(default, tuple) else default)
    assert node.get("nullable", False) == (path == "spec.algorithm.loss.dualClip")


def test_the_schema_has_exactly_the_fields_of_the_models():
    named = {path for path in NODES if path[-2:] not in {"[]", "{}"} and path.startswith(("spec.", "status."))}
    assert named == {path for path, _ in MODEL_FIELDS}


def test_only_what_depends_on_the_mode_has_no_default_in_stored_objects():
    without = {path for path, field in MODEL_FIELDS if "default" not in NODES[path] and field.default is not None}
    assert {path for path in without if path.startswith("spec.async")} == BY_MODE


def test_valid_manifests_fit_the_schema_and_the_models():
    jsonschema.Draft4Validator.check_schema(SCHEMA)
    jsonschema.Draft4Validator(SCHEMA).validate(VALID)
    Manifest.model_validate(VALID)


@pytest.mark.parametrize(("place", "name", "value"), REFUSED)
def test_what_the_models_refuse_by_type_the_schema_refuses_too(place, name, value):
    wrong = copy.deepcopy(VALID)
    here = wrong
    for key in place.split("."):
        here = here[key]
    here[name] = value
    assert list(jsonschema.Draft4Validator(SCHEMA).iter_errors(wrong))
    with pytest.raises(ValueError, match="validation error"):
        Manifest.model_validate(wrong)


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
        path = column["jsonPath"].removeprefix(".")
        assert path.startswith("metadata.") or path in NODES
    # kubectl pads each column by three; a running training with a name of twelve.
    widest = {"Mode": len("FullyAsync"), "State": len("Running"), "Age": len("3d4h")}
    shown = [column["name"] for column in columns if column["priority"] == 0]
    assert sum(max(len(name), widest.get(name, 0)) for name in shown) + 3 * len(shown) + 12 <= 80
