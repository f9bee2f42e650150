"""Which manager wrote which field of an object, and when (metadata.managedFields), and what a server-side apply makes of it.

The API server keeps this for every kind. In memory it is kept for the children of a training that the operator applies. The
operator reads the time of a report from it. As in sigs.k8s.io/structured-merge-diff/v6 (merge/update.go): the writer gets
the changed fields, and an apply also those that it repeats.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from tests.virtual.failures import Failure

type Entries = list[dict[str, Any]]
type Field = tuple[str, ...]
type Owners = dict[tuple[str, str], tuple[str, set[Field]]]
"""By manager and operation: the time of its last change, and its fields."""

APPLIED_RESOURCES = frozenset(
    {"configmaps", "serviceaccounts", "roles", "rolebindings", "networkpolicies", "poddisruptionbudgets"}
)
ATOMIC = frozenset({("spec", "podSelector"), ("spec", "selector"), ("roleRef",)})
"""Mappings that have one owner as a whole. All lists have one, except ownerReferences, whose items have."""
MANAGED_METADATA = ("labels", "annotations")


def managed(
    before: Mapping[str, Any] | None, entries: Entries, after: Mapping[str, Any], manager: str, time: str
) -> Entries:
    """Return metadata.managedFields after a write that is not an apply.

    before: the object as it was; None for a new one. entries: managedFields before the write. The writer gets the changed
    fields and its time becomes the present one; others lose these fields.
    """
    old = {} if before is None else fields(before)
    new = fields(after)
    changed = {field for field, value in new.items() if old.get(field) != value}
    if not changed and old.keys() == new.keys():
        return entries
    owners: Owners = {who: (when, owned & new.keys() - changed) for who, (when, owned) in _owners(entries).items()}
    if changed:
        writer = manager, "Update"
        owners[writer] = time, owners.get(writer, (time, set()))[1] | changed
    return _entries(after, owners)


def applied(
    live: Mapping[str, Any], intent: Mapping[str, Any], manager: str, time: str, *, force: bool
) -> dict[str, Any]:
    """Return the object after an apply, with its managedFields. Raises Failure if a field conflicts and `force` is False."""
    owners, wanted, there = _owners(live["metadata"].get("managedFields", [])), fields(intent), fields(live)
    own_key = manager, "Apply"
    when, before = owners.pop(own_key, (time, set()))
    changed = {field for field, value in wanted.items() if there.get(field) != value}
    rivals = sorted({who for (who, _), (_, owned) in owners.items() if owned & changed})
    if rivals and not force:
        message = f"Apply failed with a conflict with {', '.join(rivals)}"
        raise Failure(409, message, reason="Conflict")
    owners = {who: (time_of, owned - changed) for who, (time_of, owned) in owners.items()}
    others: set[Field] = set().union(*(owned for _, owned in owners.values()))
    body = deepcopy(dict(live))
    for field in before - wanted.keys() - others:
        _put(body, field, None)
    for field in changed:
        _put(body, field, wanted[field])
    unchanged = fields(body) == there and wanted.keys() == before
    owners[own_key] = when if unchanged else time, set(wanted)
    body["metadata"]["managedFields"] = _entries(body, owners)
    return body


def fields(body: Mapping[str, Any]) -> dict[Field, Any]:
    """Return all fields that managers can own, with their values."""
    values: dict[Field, Any] = {}
    for part in MANAGED_METADATA:
        values |= dict(_leaves(body["metadata"].get(part) or {}, ("metadata", part)))
    for owner in body["metadata"].get("ownerReferences") or ():
        values["metadata", "ownerReferences", f'k:{{"uid":"{owner["uid"]}"}}'] = owner
    for name, value in body.items():
        if name not in ("apiVersion", "kind", "metadata", "status"):
            values |= dict(_leaves(value, (name,)))
    return values


def _leaves(value: Any, field: Field) -> Iterator[tuple[Field, Any]]:
    if isinstance(value, Mapping) and field not in ATOMIC:
        for name, inside in value.items():
            yield from _leaves(inside, (*field, name))
    else:
        yield field, value


def _put(body: dict[str, Any], field: Field, value: Any) -> None:
    """Set a field, or remove it if the value is None."""
    *way, last = field
    if way == ["metadata", "ownerReferences"]:
        kept = [item for item in body["metadata"].get("ownerReferences", ()) if f'k:{{"uid":"{item["uid"]}"}}' != last]
        body["metadata"]["ownerReferences"] = kept if value is None else [*kept, value]
        return
    place = body
    for part in way:
        place = place.setdefault(part, {})
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value


def _owners(entries: Entries) -> Owners:
    return {
        (entry["manager"], entry["operation"]): (entry["time"], set(_listed(entry["fieldsV1"]))) for entry in entries
    }


def _entries(body: Mapping[str, Any], owners: Owners) -> Entries:
    return [_entry(body["apiVersion"], *who, when, owned) for who, (when, owned) in owners.items() if owned]


def _entry(version: str, manager: str, operation: str, time: str, owned: set[Field]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for field in sorted(owned):
        place = nested
        for part in field:
            place = place.setdefault(part if part.startswith("k:") else f"f:{part}", {})
    return {
        "manager": manager,
        "operation": operation,
        "apiVersion": version,
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
