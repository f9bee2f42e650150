"""Which manager wrote which field of a ConfigMap, and when: the operator reads the time of a report from it.

The API server keeps this for every kind. In memory it is kept for ConfigMaps, whose fields are few.
"""

from collections.abc import Iterator, Mapping
from typing import Any

type Entries = list[dict[str, Any]]
type Field = tuple[str, ...]


def managed(before: Mapping[str, Any] | None, after: Mapping[str, Any], manager: str, time: str) -> Entries:
    """Return metadata.managedFields after a write. before: the object as it was; None for a new one.

    The writer gets the changed fields and its time becomes the present one; others lose these fields.
    """
    entries: Entries = [] if before is None else before["metadata"].get("managedFields", [])
    old = {} if before is None else dict(_fields(before))
    new = dict(_fields(after))
    changed = {field for field, value in new.items() if old.get(field) != value}
    if not changed and old.keys() == new.keys():
        return entries
    owned = {entry["manager"]: (entry["time"], set(_listed(entry["fieldsV1"]))) for entry in entries}
    owned = {name: (when, fields & new.keys() - changed) for name, (when, fields) in owned.items()}
    if changed:
        owned[manager] = time, owned.get(manager, (time, set()))[1] | changed
    return [_entry(name, when, fields) for name, (when, fields) in owned.items() if fields]


def _fields(body: Mapping[str, Any]) -> Iterator[tuple[Field, Any]]:
    for part in ("data", "binaryData"):
        for key, value in (body.get(part) or {}).items():
            yield (part, key), value
    for part in ("labels", "annotations"):
        for key, value in (body["metadata"].get(part) or {}).items():
            yield ("metadata", part, key), value


def _entry(manager: str, time: str, fields: set[Field]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for field in sorted(fields):
        place = nested
        for part in field:
            place = place.setdefault(f"f:{part}", {})
    return {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "time": time,
        "fieldsType": "FieldsV1",
        "fieldsV1": nested,
    }


def _listed(nested: Mapping[str, Any], way: Field = ()) -> Iterator[Field]:
    for name, below in nested.items():
        field = (*way, name.removeprefix("f:"))
        if below:
            yield from _listed(below, field)
        else:
            yield field
