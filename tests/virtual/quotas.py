"""Quotas on the number of objects of a kind: `count/rayjobs.ray.io`."""

from collections.abc import Mapping
from typing import Any

from tests.virtual.failures import Failure
from tests.virtual.resources import RESOURCES, Resource
from tests.virtual.stored_objects import Objects

QUOTA = next(resource for resource in RESOURCES if resource.plural == "resourcequotas")


def admit(objects: Objects, resource: Resource, namespace: str | None, body: Mapping[str, Any]) -> None:
    """Raise Failure if one object more of this kind would exceed a quota of its namespace."""
    name = f"count/{resource.qualified}"
    for quota in objects.of(QUOTA, namespace):
        hard = quota.body["spec"]["hard"].get(name)
        used = sum(1 for _ in objects.of(resource, namespace))
        if hard is not None and used + 1 > int(hard):
            own, it = quota.metadata["name"], body["metadata"]["name"]
            numbers = f"requested: {name}=1, used: {name}={used}, limited: {name}={hard}"
            raise Failure(403, f'{resource.qualified} "{it}" is forbidden: exceeded quota: {own}, {numbers}')


def counted(objects: Objects, body: dict[str, Any]) -> dict[str, Any]:
    """Return a quota with its status, as the controller of quotas writes it."""
    hard = body["spec"]["hard"]
    kinds = {f"count/{resource.qualified}": resource for resource in RESOURCES}
    namespace = body["metadata"]["namespace"]
    used = {name: str(sum(1 for _ in objects.of(kinds[name], namespace))) for name in hard if name in kinds}
    return body | {"status": {"hard": hard, "used": used}}
