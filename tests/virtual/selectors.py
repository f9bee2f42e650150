"""Label selectors: `key`, `!key`, `key=value`, `key!=value` and their conjunction."""

from collections.abc import Callable, Mapping
from typing import Any

type Matches = Callable[[Mapping[str, Any]], bool]


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
