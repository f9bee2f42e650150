"""Defaults that the API server adds to a training, from its definition's schema."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.virtual.resources import Resource

DEFINITION = Path(__file__).parents[2] / "crds" / "rl.qwen35.io_qwen35trainings.yaml"


def defaulted(resource: Resource, body: dict[str, Any]) -> dict[str, Any]:
    """Return the object with the defaults of its kind. Kinds other than ours have none in memory."""
    if resource.plural != "qwen35trainings":
        return body
    return dict(with_defaults(_schema(), body))


@cache
def _schema() -> Mapping[str, Any]:
    return schema_of(DEFINITION)


def schema_of(definition_file: Path) -> Mapping[str, Any]:
    """Return the schema of the only version in a file with a CustomResourceDefinition."""
    definition = yaml.load(definition_file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = definition["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def with_defaults(schema: Mapping[str, Any], value: Any) -> Any:
    """Return a value with the defaults of its structural schema."""
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    result = dict(value)
    for name, below in schema.get("properties", {}).items():
        if name not in result and "default" in below:
            result[name] = deepcopy(below["default"])
        if name in result:
            result[name] = with_defaults(below, result[name])
    return result
