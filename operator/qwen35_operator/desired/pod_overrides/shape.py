"""Checks that a user's change can be merged into a pod template.

Mappings and lists must be where a pod template has them, and an item of a list must have the key by which the list is
merged. The API server checks this too, but only when the RayJob is created, and it reports only the first problem.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from qwen35_operator.desired.pod_overrides.merge import MERGE_KEYS, identity
from qwen35_operator.desired.problem_limits import field_of
from qwen35_trainer.manifest import Problem

_CONTAINERS: Final = ("containers", "initContainers")
MAPPINGS: Final = frozenset(
    {(), ("metadata",), ("metadata", "labels"), ("metadata", "annotations"), ("spec",)}
    | {("spec", kind, *rest) for kind in _CONTAINERS for rest in (("resources",), ("resources", "limits"))}
    | {("spec", kind, "resources", "requests") for kind in _CONTAINERS}
)
"""Paths of mappings that a change must not set to null, because null would remove the operator's fields in them."""
REMOVABLE: Final = frozenset(
    {("spec", name) for name in ("affinity", "nodeSelector", "securityContext", "dnsConfig")}
    | {("spec", kind, "securityContext") for kind in _CONTAINERS}
)
"""Paths of mappings that a change may set to null, which removes them."""
STRING_MAPPINGS: Final = frozenset({("metadata", "labels"), ("metadata", "annotations"), ("spec", "nodeSelector")})
"""Paths of mappings whose values must be strings."""


def problems(change: object, place: str) -> Iterator[Problem]:
    """Yield a problem for each part of a user's change that cannot be merged into a pod template.

    For example, the change may have a text in a field that is a list in pod templates. place: the field of the manifest
    that contains the change.
    """
    yield from _any(change, (), place)


def _any(value: object, path: tuple[str, ...], place: str) -> Iterator[Problem]:
    if path in MAPPINGS or (path in REMOVABLE and value is not None):
        if not isinstance(value, Mapping):
            yield Problem(place, f"{_shown(value)} is not a mapping.", "Write key: value pairs here, or leave it out.")
            return
    elif path in MERGE_KEYS or (path == ("spec", "tolerations") and value is not None):
        if not isinstance(value, list):
            yield Problem(place, f"{_shown(value)} is not a list.", "Write a list here, or leave it out.")
            return
        yield from _list(value, path, place)
        return
    if isinstance(value, Mapping):
        yield from _mapping(value, path, place)
    elif isinstance(value, list):
        for index, inside in enumerate(value):
            if isinstance(inside, Mapping | list):
                yield from _any(inside, (*path, "*"), f"{place}[{index}]")


def _mapping(value: Mapping[str, Any], path: tuple[str, ...], place: str) -> Iterator[Problem]:
    for key, inside in value.items():
        here = field_of(place, key)
        if key.startswith("$"):
            yield Problem(here, "directives are not supported.", "Remove it; null removes a key.")
        elif path in STRING_MAPPINGS and not (isinstance(inside, str) or inside is None):
            yield Problem(here, f"{_shown(inside)} is not a string.", "Put it in quotes.")
        else:
            yield from _any(inside, (*path, key), here)


def _list(items: list[Any], path: tuple[str, ...], place: str) -> Iterator[Problem]:
    keys = MERGE_KEYS.get(path, ())
    identities = set()
    for index, item in enumerate(items):
        here = f"{place}[{index}]"
        if not isinstance(item, Mapping):
            yield Problem(here, f"{_shown(item)} is not a mapping.", "Write key: value pairs here.")
            continue
        invalid = [key for key in keys[:1] if type(item.get(key)) is not (int if key == "containerPort" else str)]
        for key in invalid:
            kind = "number" if key == "containerPort" else "string"
            yield Problem(here, f"has no {key}, by which its list is merged.", f"Add {key}, a {kind}.")
        for key in keys[1:]:  # may be absent
            if not isinstance(item.get(key), str | None):
                yield Problem(
                    f"{here}.{key}", f"{_shown(item[key])} is not a string.", "Write a string, or leave it out."
                )
        if keys and not invalid:
            if (name := repr(identity(path, item))) in identities:
                yield Problem(here, f"{item[keys[0]]} is listed twice.", "Keep one.")
            identities.add(name)
        # MERGE_KEYS and MAPPINGS contain no positions, so items have the path of their list.
        yield from _mapping(item, path, here)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else json.dumps(value)
