"""Server-side apply: which fields of an object the operator owns (metadata.managedFields), and how it takes them over.

The API server keeps an entry for each manager and operation. An apply removes the fields of the manager's entry for Apply
that the applied object does not have, and keeps the fields of all other managers. A field that the operator wrote by
creating or patching the object is in its entry for Update: while that entry exists, an apply could never remove the
field. The fields of that entry are therefore moved to the entry for Apply before the first apply, as kubectl does with the
fields of its client-side applies (client-go, util/csaupgrade).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

FIELD_MANAGER: Final = "qwen35-operator"
"""The operator's name in managedFields. Earlier releases wrote under it too: it is their User-Agent."""

type FieldsEntry = Mapping[str, Any]
"""One entry of metadata.managedFields."""


def taken_over(entries: Sequence[FieldsEntry]) -> list[FieldsEntry] | None:
    """Return managedFields in which the operator owns all of its fields by Apply; None if this is already so."""
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
    """Whether this is the operator's entry for the operation. Entries for a subresource, such as the status, do not count."""
    own = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == operation
    return own and not entry.get("subresource")


def _union(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are in at least one of two sets of fields, which FieldsV1 writes as nested mappings."""
    return {name: _union(first.get(name, {}), second.get(name, {})) for name in (*first, *second)}
