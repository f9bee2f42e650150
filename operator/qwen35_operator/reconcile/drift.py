"""Detects children that somebody has changed since the operator last wrote them.

    own write: version 7 ─► the watch reports version 9 ─► read ─┬─► as desired: version 9 is known from now on
                                                                 └─► differs: apply ─► version 10

Every change of an object changes its resourceVersion, so the versions show a change without the content, which the
operator does not watch of most kinds. After a start, the operator knows none of its own writes: it reads the children of
every running training once, and so also finds what was changed while no operator ran.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.kube.object_records import Child
from qwen35_operator.reconcile.observed import ChildKey

REPAIR_SECONDS = 10.0
"""Minimum time between two reads or repairs of an object. Otherwise a controller that always writes again would keep the
operator and the API server busy."""
SHARED_FIELDS = ("labels", "annotations")
"""Metadata in which other managers may have entries of their own."""


def drifted(children: Iterable[Child], now: datetime) -> tuple[frozenset[ChildKey], float | None]:
    """Return the children to check now, and the seconds until the next ones have to be checked; None if there are none.

    The ConfigMaps that the trainer writes have no hash and never drift.
    """
    due: set[ChildKey] = set()
    waits: list[float] = []
    for child in children:
        last = child.own_write
        if child.hash is None or child.deleting is not None or (last is not None and last.version == child.version):
            continue
        wait = 0.0 if last is None else REPAIR_SECONDS - (now - last.time).total_seconds()
        if wait <= 0:
            due.add((child.kind, child.name))
        else:
            waits.append(wait)
    return frozenset(due), min(waits, default=None)


def is_as_desired(current: KubeObject, desired: KubeObject) -> bool:
    """Whether an object has all that the operator wants it to have, and nothing else where others have no say.

    Others may add labels, annotations, owners and keys of a ConfigMap's data. A selector or a list of rules has to be
    exactly the desired one: an addition there would change its meaning.
    """
    now, wanted = current["metadata"], desired["metadata"]
    if not all(_contains(now.get(name), wanted.get(name, {})) for name in SHARED_FIELDS):
        return False
    if not all(owner in now.get("ownerReferences", ()) for owner in wanted["ownerReferences"]):
        return False
    return all(
        _contains(current.get(name), value) if name == "data" else current.get(name) == value
        for name, value in desired.items()
        if name not in ("apiVersion", "kind", "metadata")
    )


def _contains(current: Mapping[str, Any] | None, desired: Mapping[str, Any]) -> bool:
    return desired.items() <= (current or {}).items()
