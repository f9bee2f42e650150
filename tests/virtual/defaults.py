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
    return dict(_defaulted(_schema(), body))


@cache
def _schema() -> Mapping[str, Any]:
    definition = yaml.load(DEFINITION.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = definition["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def _defaulted(schema: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, list):
        return [_defaulted(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    result = dict(value)
    for name, below in schema.get("properties", {}).items():
        if name not in result and "default" in below:
            result[name] = deepcopy(below["default"])
        if name in result:
            result[name] = _defaulted(below, result[name])
    return result
