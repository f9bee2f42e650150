"""Builds merge patches (RFC 7386), so that a write carries only what changes."""

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that turns the JSON object `before` into `after`; {} if they are equal.

    Neither object may contain null as a field's value. A list that differs is in the patch as a whole.
    """
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            if changes := merge_patch(old, value):
                patch[name] = changes
        elif name not in before or old != value:
            patch[name] = value
    return patch
