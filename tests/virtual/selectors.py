"""Label selectors: `key`, `!key`, `key=value`, `key!=value` and their conjunction. Field selectors: `metadata.name=value`."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.virtual.failures import Failure

type Matches = Callable[[Mapping[str, Any]], bool]


def selected(query: Mapping[str, str]) -> Matches:
    """Return whether an object fulfils the selectors of a list or watch. Without any, all do."""
    labelled, name = selector(query.get("labelSelector", "")), selected_name(query)
    return labelled if name is None else lambda body: body["metadata"]["name"] == name and labelled(body)


def selected_name(query: Mapping[str, str]) -> str | None:
    """Return the name that the field selector requires; None without one. Raises Failure for another field."""
    field, _, name = query.get("fieldSelector", "").partition("=")
    if field not in ("", "metadata.name"):
        raise Failure(400, f"the field selector {field} is not served in memory", reason="BadRequest")
    return name or None


def selector(text: str) -> Matches:
    """Return whether an object's labels fulfil the selector. An empty one selects everything."""
    tests = [_test(part.strip()) for part in text.split(",") if part.strip()]

    def matches(body: Mapping[str, Any]) -> bool:
        labels = body["metadata"].get("labels") or {}
        return all(test(labels) for test in tests)

    return matches


def _test(part: str) -> Callable[[Mapping[str, str]], bool]:
    for sign, wanted in (("!=", False), ("==", True), ("=", True)):
        key, separator, value = part.partition(sign)
        if separator:
            return lambda labels: (labels.get(key.strip()) == value.strip()) is wanted
    if part.startswith("!"):
        return lambda labels: part[1:] not in labels
    return lambda labels: part in labels
