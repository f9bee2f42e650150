"""Prints the field reference, docs/reference/api.md: `python -m qwen35_operator.api.field_reference`."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from qwen35_operator.api import crd, v1alpha1
from qwen35_operator.api.rules import RULES
from qwen35_trainer.manifest import fields as walk

INTRODUCTION = f"""<!-- Generated from the pydantic models by `python -m qwen35_operator.api.field_reference`. Do not edit. -->
# {v1alpha1.KIND}

`apiVersion: {v1alpha1.GROUP}/{v1alpha1.VERSION}`, `kind: {v1alpha1.KIND}`, short name `{v1alpha1.SHORT_NAMES[0]}`.

A field without a default is required, unless its default is marked *none*. Unknown fields are errors. The last part
of each description names the key of verl that the field corresponds to.
"""
POD_TEMPLATES = """The API server checks the types of these fields in `spec.pods.head`, `spec.pods.rollout` and `spec.pods.train`. Every other
field of a Kubernetes pod template is preserved, and checked when the training is accepted. null removes what the
operator's template has."""


def text() -> str:
    """Return the reference as Markdown, from the same models as the CRD."""
    nodes = dict(crd.fields(crd.schema()))
    parts = [INTRODUCTION]
    for path, model in (("spec", v1alpha1.TrainingSpec), ("status", v1alpha1.TrainingStatus)):
        parts += _sections(path, model, nodes)
    parts.append(_pod_templates(nodes))
    rules = [
        f"| `{f'{place}{rule.field or ""}' or 'metadata.name'}` | {_cell(rule.message)} |"
        for place in RULES
        for rule in RULES[place]
    ]
    parts.append(
        "\n".join(
            ["## Rules", "", "Checks of the API server in addition to types.", "", *_table("Place", "Rule"), *rules]
        )
    )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sections(path: str, model: type[BaseModel], nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the Markdown section about a model, then those about the models in its fields, in the order of the fields.

    path: where the model is in the resource, such as spec.data. nodes: the nodes of the CRD's schema, by path.
    """
    lines = [f"## {path}", "", (model.__doc__ or "").strip().split("\n\n")[0], ""]
    lines += _table("Field", "Type", "Default", "Description")
    inside: list[tuple[str, type[BaseModel]]] = []
    for name, field in walk.fields(model).items():
        node = nodes[f"{path}.{name}"]
        lines.append(
            f"| `{name}` | {_type(node, f'{path}.{name}')} | {_default(field)} | {_cell(node['description'])} |"
        )
        item = walk.item(field.annotation)
        if (part := walk.section(field.annotation)) is not None:
            inside.append((f"{path}.{name}", part))
        elif item is not None and (part := walk.section(item)) is not None:
            inside.append((f"{path}.{name}[]", part))
    yield "\n".join(lines)
    for place, part in inside:
        yield from _sections(place, part, nodes)


def _pod_templates(nodes: Mapping[str, Any]) -> str:
    """Return the Markdown section about the typed fields of the templates in spec.pods, which all have the same fields."""
    lines = ["## Pod templates", "", POD_TEMPLATES, "", *_table("Field", "Type", "Description")]
    template = "spec.pods.head."
    for path, node in nodes.items():
        if path.startswith(template) and not path.endswith(("[]", "{}")):
            lines.append(f"| `{path.removeprefix(template)}` | {_template_type(node)} | {_cell(node['description'])} |")
    return "\n".join(lines)


def _template_type(node: Mapping[str, Any]) -> str:
    if keys := node.get("x-kubernetes-list-map-keys"):
        return f"list, merged by {' and '.join(keys)}"
    names = {"array": "list", "object": "map", "string": "text"}
    return names.get(str(node["type"]), str(node["type"]))


def _table(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _type(node: Mapping[str, Any], path: str) -> str:
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "items" in node:
        return f"list of {_type(node['items'], f'{path}[]')}, at most {node['maxItems']}"
    if "x-kubernetes-preserve-unknown-fields" in node and "type" in node:
        return "[part of a pod template](#pod-templates)" if "properties" in node else "map"
    if "properties" in node:
        return f"[{path.rsplit('.', 1)[-1]}](#{''.join(sign for sign in path.lower() if sign.isalnum())})"
    if "additionalProperties" in node:
        return f"map, at most {node['maxProperties']}"
    if node.get("format") == "date-time":
        return "time"
    type_names = {"string": "text", "boolean": "true, false"}
    return type_names.get(str(node["type"]), str(node["type"])) + _bounds(node)


def _bounds(node: Mapping[str, Any]) -> str:
    if "maxLength" in node:
        return f", at most {node['maxLength']}"
    low, high = node.get("minimum"), node.get("maximum")
    words = []
    if low is not None:
        words.append(f"above {low:g}" if node.get("exclusiveMinimum") else f"from {low}")
    if high is not None:
        words.append(f"below {high:g}" if node.get("exclusiveMaximum") else f"to {high}")
    bounds = f", {' '.join(words)}" if words else ""
    return f"{bounds}, a multiple of {node['multipleOf']}" if "multipleOf" in node else bounds


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "*none*"
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{json.dumps(value)}`"


def _cell(description: str) -> str:
    return description.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(text())
