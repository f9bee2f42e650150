"""Merges changes into pod templates as `kubectl patch` does (strategic merge).

Mappings are merged key by key, and null removes a key. A list in the table MERGE_KEYS is merged by the keys that
identify its items: existing items are merged in place, and new items are appended. Every other list is replaced. The
table is from k8s.io/api/core/v1 (patchMergeKey; listMapKey for more than one key).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_CONTAINER: Final[Mapping[str, tuple[str, ...]]] = {
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
}
MERGE_KEYS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("spec", "containers"): ("name",),
    ("spec", "initContainers"): ("name",),
    ("spec", "volumes"): ("name",),
    ("spec", "imagePullSecrets"): ("name",),
    ("spec", "hostAliases"): ("ip",),
    ("spec", "schedulingGates"): ("name",),
    ("spec", "resourceClaims"): ("name",),
    ("spec", "topologySpreadConstraints"): ("topologyKey", "whenUnsatisfiable"),
} | {("spec", kind, name): key for kind in ("containers", "initContainers") for name, key in _CONTAINER.items()}
"""The lists that are merged item by item: the path of each in a pod template, and the keys whose values identify an
item."""
KEY_DEFAULTS: Final[Mapping[str, str]] = {"protocol": "TCP"}


def merge(template: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod template with a user's change merged into it. The change must have passed `shape.problems`."""
    return _mapping(template, change, ())


def identity(path: tuple[str, ...], item: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that identify `item` in the list at `path`: one for each of the list's keys in MERGE_KEYS."""
    return tuple(item.get(key, KEY_DEFAULTS.get(key)) for key in MERGE_KEYS[path])


def _mapping(old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    result = dict(old)
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _value(result.get(key), value, (*path, key))
    return result


def _value(old: object, new: object, path: tuple[str, ...]) -> object:
    if isinstance(new, Mapping):
        return _mapping(old if isinstance(old, Mapping) else {}, new, path)
    if isinstance(new, list) and path in MERGE_KEYS:
        return _items(old if isinstance(old, list) else [], new, path)
    return new


def _items(old: Sequence[Any], new: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
    result = {identity(path, item): item for item in old}
    for item in new:
        key = identity(path, item)
        result[key] = _mapping(result.get(key, {}), item, path)
    return list(result.values())
