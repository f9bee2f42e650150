"""Server-side apply: which fields of an object the operator owns (metadata.managedFields), and how it takes them over.

The API server keeps one entry for each manager and operation. An apply removes fields that are in the manager's entry
for Apply and not in the applied object. It keeps the fields in all other entries. A field that the operator wrote by
creating or patching the object is in the operator's entry for Update. While a field is in that entry, no apply removes
the field. Before the first apply, the fields of the entry for Update are therefore moved to the entry for Apply.
kubectl moves the fields of its client-side applies in the same way (client-go, util/csaupgrade).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

FIELD_MANAGER: Final = "qwen35-operator"
"""The operator's name in managedFields. Earlier releases wrote under the same name, because it was their User-Agent."""

type FieldsEntry = Mapping[str, Any]
"""One entry of metadata.managedFields."""


def taken_over(entries: Sequence[FieldsEntry]) -> list[FieldsEntry] | None:
    """Return managedFields with the operator's entries for Update merged into its entry for Apply.

    Returns None if the operator has no entry for Update.
    """
    written = [entry for entry in entries if _is_own(entry, "Update")]
    if not written:
        return None
    applied = [entry for entry in entries if _is_own(entry, "Apply")]
    target = {**(applied or written)[0], "operation": "Apply"}
    for entry in written:
        if entry["apiVersion"] == target["apiVersion"]:
            target["fieldsV1"] = _union(target["fieldsV1"], entry["fieldsV1"])
    return [*(entry for entry in entries if entry not in (*written, *applied)), target]


def _is_own(entry: FieldsEntry, operation: str) -> bool:
    """Return whether the entry is the operator's for `operation`, and not for a subresource such as status."""
    own = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == operation
    return own and not entry.get("subresource")


def _union(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the union of two sets of fields in the format FieldsV1: nested mappings, with {} for each leaf."""
    return {name: _union(first.get(name, {}), second.get(name, {})) for name in (*first, *second)}
