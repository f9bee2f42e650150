"""Renders the CustomResourceDefinition of Qwen35Training from the pydantic models.

    models ─► JSON schema ─► structural schema (no references or unions) ─► list types, CEL rules, printer columns ─► CRD

`python -m qwen35_operator.api.crd` prints the definition.
"""

import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from qwen35_operator.api import v1alpha1
from qwen35_operator.api.pod_template_schema import POD_TEMPLATE
from qwen35_operator.api.rules import RULES
from qwen35_trainer.manifest.document import dump_document

type Schema = dict[str, Any]

COPIED_KEYWORDS = (
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
)
POD_TEMPLATES = ("head", "rollout", "train")
"""The fields of spec.pods that contain a part of a pod template."""
SELECTABLE_FIELDS = (".spec.mode", ".status.state")
"""Fields by which `kubectl get --field-selector` selects trainings."""
MAX_INT32 = 2**31 - 1
FREE_VALUE = "Text, number, true or false."
COLUMNS = (
    ("Mode", "string", ".spec.mode", 1, "How generation and training are arranged."),
    ("State", "string", ".status.state", 0, "Summary of the conditions in one word."),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0, "Whether the cluster matches the spec."),
    ("Update", "integer", ".status.progress.update", 0, "Optimizer steps done."),
    ("Weights", "integer", ".status.progress.version", 0, "Weight version that rollouts use."),
    ("Reward", "number", ".status.progress.reward", 0, "Mean reward of the last update."),
    ("Rollout", "integer", ".status.rolloutNodes", 0, "Nodes of the rollout pool."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since the creation of the training."),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1, "Why it is ready, or why not."),
    ("Lag", "number", ".status.progress.lagMean", 1, "Mean age of trained tokens, in weight versions."),
    ("Checkpoint", "integer", ".status.lastCheckpoint.update", 1, "Update of the newest checkpoint."),
    ("Queue", "string", r".metadata.labels.kueue\.x-k8s\.io/queue-name", 1, "Kueue queue."),
)


def render() -> Schema:
    """Return the CustomResourceDefinition as plain data."""
    names = {"kind": v1alpha1.KIND, "listKind": f"{v1alpha1.KIND}List", "plural": v1alpha1.PLURAL}
    names |= {"singular": v1alpha1.SINGULAR}
    lists = {"shortNames": list(v1alpha1.SHORT_NAMES), "categories": list(v1alpha1.CATEGORIES)}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{v1alpha1.PLURAL}.{v1alpha1.GROUP}"},
        "spec": {
            "group": v1alpha1.GROUP,
            "scope": "Namespaced",
            "names": names | lists,
            "versions": [_version()],
        },
    }


def text() -> str:
    """Return the CustomResourceDefinition as YAML."""
    head = "# Generated from the pydantic models by `python -m qwen35_operator.api.crd`. Do not edit.\n"
    return head + dump_document(render())


def schema() -> Schema:
    """Return the structural schema of a Qwen35Training, with its validation rules."""
    tree: Schema = {
        "type": "object",
        "description": "A reinforcement-learning or supervised training run of a Qwen3.5 model.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "maxLength": 64, "description": "Version of this format."},
            "kind": {"type": "string", "maxLength": 64, "description": "Kind of object."},
            "metadata": {"type": "object"},
            "spec": _structural_of(v1alpha1.TrainingSpec, "The training to run."),
            "status": _structural_of(v1alpha1.TrainingStatus, "The operator's report."),
        },
    }
    for name in POD_TEMPLATES:
        _at(tree, f"spec.pods.{name}")["properties"] = deepcopy(POD_TEMPLATE)
    for place, rules in RULES.items():
        _at(tree, place)["x-kubernetes-validations"] = [rule.render() for rule in rules]
    return tree


def fields(tree: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every node of a structural schema with its path, such as spec.data.train[].

    The path of a list's items ends in [], and the path of a map's values in {}. path: the path of `tree` itself.
    """
    yield path, tree
    for name, inside in tree.get("properties", {}).items():
        yield from fields(inside, f"{path}.{name}" if path else name)
    if "items" in tree:
        yield from fields(tree["items"], f"{path}[]")
    if "additionalProperties" in tree:
        yield from fields(tree["additionalProperties"], f"{path}{{}}")


def _version() -> Schema:
    columns = [
        {"name": name, "type": kind, "jsonPath": path, "priority": priority, "description": description}
        for name, kind, path, priority, description in COLUMNS
    ]
    return {
        "name": v1alpha1.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "selectableFields": [{"jsonPath": path} for path in SELECTABLE_FIELDS],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.rollout.nodes",  # `kubectl scale`: reconcile/elasticity.py changes the pool
                "statusReplicasPath": ".status.rolloutNodes",
                "labelSelectorPath": ".status.rolloutSelector",
            },
        },
        "schema": {"openAPIV3Schema": schema()},
    }


def _structural_of(model: type[BaseModel], description: str) -> Schema:
    json_schema = model.model_json_schema(by_alias=True)
    return _structural(json_schema, json_schema.get("$defs", {})) | {"description": description}


def _structural(source: Mapping[str, Any], defs: Mapping[str, Any]) -> Schema:
    """Convert one node of pydantic's JSON schema to a structural schema.

    defs: the `$defs` of the JSON schema, to which the node's references point.
    """
    node, nullable = _resolved(source, defs)
    if "x-kubernetes-preserve-unknown-fields" in node:
        keywords = {key: node[key] for key in ("description", "maxProperties") if key in node}
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, **keywords}
    if "anyOf" in node:
        # A structural schema cannot express a union of scalars; the operator refuses other values.
        return {"x-kubernetes-preserve-unknown-fields": True, "description": node.get("description", FREE_VALUE)}
    tree: Schema = {key: node[key] for key in ("type", "description") if key in node}
    tree |= {key: node[key] for key in COPIED_KEYWORDS if key in node}
    if "const" in node:
        tree["enum"] = [node["const"]]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node:
            tree |= {bound: node[exclusive], exclusive: True}
    tree |= _number_format(tree)
    tree |= _default(node, nullable)
    if "properties" in node:
        tree |= {"required": node["required"]} if "required" in node else {}
        tree["properties"] = {name: _structural(inside, defs) for name, inside in node["properties"].items()}
    elif isinstance(node.get("additionalProperties"), Mapping):
        tree["additionalProperties"] = _structural(node["additionalProperties"], defs)
    if "items" in node:
        tree |= _list_type(node, _structural(node["items"], defs))
    return tree


def _resolved(node: Mapping[str, Any], defs: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Resolve a node's references, and replace a union of null and one type by this type.

    Returns the new node, and whether `node` allows null. defs: the `$defs` of the JSON schema, to which references
    point.
    """
    nullable = False
    while True:
        if "$ref" in node:
            node = {**defs[node["$ref"].rsplit("/", 1)[-1]], **{k: v for k, v in node.items() if k != "$ref"}}
        elif {"type": "null"} in node.get("anyOf", []):
            options = [option for option in node["anyOf"] if option != {"type": "null"}]
            assert len(options) == 1, f"a union with null of more than one type: {node}"
            node = {**options[0], **{k: v for k, v in node.items() if k != "anyOf"}}
            nullable = True
        else:
            return node, nullable


def _default(node: Mapping[str, Any], nullable: bool) -> Schema:
    """Return the keywords that declare a field's default; {} if the default is None or depends on the mode.

    The default of a section is {}: the API server then applies the defaults of the section's fields. nullable: whether
    the field's type allows null. The keyword `nullable` makes the API server keep an explicit null, which it otherwise
    replaces by the default. A field without a default does not need the keyword: the API server removes the null, and
    an absent field means the same.
    """
    if node.get("default") is None or node.get("x-default-by-mode"):
        return {}
    if "properties" in node:
        return {"default": {}}
    return {"default": node["default"]} | ({"nullable": True} if nullable else {})


def _number_format(tree: Schema) -> Schema:
    """Return the keyword `format` for a number, as in the schemas of Kubernetes' own kinds. The API server ignores it.

    tree: a node with its bounds. Generators of typed clients choose the type of the field by the format.
    """
    if tree.get("type") == "number":
        return {"format": "double"}
    if tree.get("type") != "integer":
        return {}
    bounds = tree.get("minimum"), tree.get("maximum")
    return {"format": "int32" if all(bound is not None and abs(bound) <= MAX_INT32 for bound in bounds) else "int64"}


def _list_type(node: Mapping[str, Any], items: Schema) -> Schema:
    keys = node.get("x-kubernetes-list-map-keys", ["name"] if "name" in items.get("required", []) else [])
    if not keys:
        return {"x-kubernetes-list-type": "atomic", "items": items}
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys, "items": items}


def _at(tree: Schema, place: str) -> Schema:
    for name in place.replace("[]", ".[]").split(".") if place else []:
        tree = tree["items"] if name == "[]" else tree["properties"][name]
    return tree


if __name__ == "__main__":
    sys.stdout.write(text())
