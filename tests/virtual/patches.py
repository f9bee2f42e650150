"""The patches that the operator, the tests and the kubelets send. Patched objects are new: the given ones stay as they are."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from tests.virtual.failures import Failure

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""`managed_fields.applied` carries these out."""
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
REFUSED = "the server rejected our request due to an error in our request"
"""The message for a JSON patch that does not fit."""
MERGED_BY = {"conditions": "type", "taints": "key"}
"""Lists that a strategic merge patch merges by a key. All others are replaced."""


def patched(body: Mapping[str, Any], patch: Any, kind: str) -> dict[str, Any]:
    """Return the patched object. kind: media type of the patch. Raises Failure if the patch does not fit."""
    if kind == JSON_PATCH:
        return _json(body, patch)
    if kind == MERGE_PATCH:
        return dict(_merged(body, patch, strategic=False))
    if kind == STRATEGIC_PATCH:
        return dict(_merged(body, patch, strategic=True))
    raise Failure(415, f"patches of type {kind} are not served in memory", reason="UnsupportedMediaType")


def _json(body: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    changed: dict[str, Any] = deepcopy(dict(body))
    for step in steps:
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].strip("/").split("/")]
        where: Any = changed
        try:
            for part in way:
                where = where[int(part)] if isinstance(where, list) else where[part]
            _step(where, last, step)
        except (KeyError, IndexError, TypeError):
            raise Failure(422, REFUSED) from None
    return changed


def _step(where: Any, last: str, step: Mapping[str, Any]) -> None:
    """Carry out one step. Raises KeyError if the place does not exist, and Failure if a test fails."""
    key: Any = int(last) if isinstance(where, list) else last
    match step["op"]:
        case "test":
            there = where[key] if isinstance(where, list) else where.get(key)
            if there != step["value"]:
                raise Failure(422, REFUSED)
        case "add" if isinstance(where, list):
            where.insert(len(where) if last == "-" else key, deepcopy(step["value"]))
        case "add":
            where[key] = deepcopy(step["value"])
        case "replace":
            where[key]  # must exist
            where[key] = deepcopy(step["value"])
        case "remove":
            del where[key]
        case other:
            raise Failure(400, f"operation {other} is not served in memory")


def _merged(body: Any, patch: Any, *, strategic: bool) -> Any:
    if not isinstance(patch, Mapping):
        return deepcopy(patch)
    result = deepcopy(dict(body)) if isinstance(body, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif strategic and name in MERGED_BY:
            result[name] = _by_key(result.get(name) or [], value, MERGED_BY[name])
        else:
            result[name] = _merged(result.get(name), value, strategic=strategic)
    return result


def _by_key(entries: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    merged = {entry[key]: dict(entry) for entry in entries}
    for entry in patch:
        merged[entry[key]] = merged.get(entry[key], {}) | dict(entry)
    return list(merged.values())
