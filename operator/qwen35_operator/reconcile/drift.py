"""Detects drift: children that somebody has changed since the operator last wrote them.

    own write: version 7 ─► the watch reports version 9 ─► read ─┬─► as desired: version 9 is known from now on
                                                                 └─► differs: apply ─► version 10

Every change of an object changes its resourceVersion. The operator therefore detects a change by the version, and
watches only the metadata of most kinds. A changed child is read, and repaired if it differs from the desired object.
After a start, the operator knows none of its own writes. It then reads the children of every running training once, and
so also finds changes from the time when no operator ran. These reads begin REPORTS_FIRST_SECONDS after the start and are spread,
because a new leader of 500 running trainings would otherwise send 3,000 requests before it serves the reports that nobody has
served since the last leader. A child that changes after the start is read immediately.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.kube.object_records import Child
from qwen35_operator.reconcile.observed import ChildKey
from qwen35_operator.reconcile.shares import share

REPAIR_SECONDS = 10.0
"""Minimum time between two reads or repairs of an object.

Without this limit, a controller that undoes every repair would keep the operator and the API server busy.
"""
REPORTS_FIRST_SECONDS, FIRST_READS_SECONDS = 10.0, 50.0
"""Time after the start from which, and within which, the children of running trainings are read for the first time."""
FIRST_READS_PER_SECOND = 3.0
"""Maximum number of trainings per second whose children are read for the first time, each with six requests. More than 120 running
trainings take longer than FIRST_READS_SECONDS."""
SHARED_FIELDS = ("labels", "annotations")
"""Metadata in which other managers may have entries of their own."""


def first_read(uid: str, started: datetime, running: int) -> datetime:
    """Return when the children of a running training are read for the first time.

    uid: of the training. started: since when this process leads. running: number of all running trainings.
    """
    seconds = max(FIRST_READS_SECONDS - REPORTS_FIRST_SECONDS, running / FIRST_READS_PER_SECOND)
    return started + timedelta(seconds=REPORTS_FIRST_SECONDS + share(uid) * seconds)


def drifted(
    children: Iterable[Child], now: datetime, first: datetime | None = None, known_version: int = 0
) -> tuple[frozenset[ChildKey], float | None]:
    """Return the child objects to check now, and the seconds until further ones have to be checked.

    The seconds are None if no further object has changed. children: those that only the operator writes, so without the
    ConfigMaps that the trainer writes. first: when to check those that this process has not written or checked yet; None for now.
    known_version: the newest resourceVersion when this process began to lead. Those with a newer one have changed since, and
    are checked now.
    """
    due: set[ChildKey] = set()
    waits: list[float] = []
    for child in children:
        last = child.own_write
        if child.deleting is not None or (last is not None and last.version == child.version):
            continue
        if last is not None:
            due_at = last.time + timedelta(seconds=REPAIR_SECONDS)
        else:
            due_at = now if first is None or int(child.version) > known_version else first
        wait = (due_at - now).total_seconds()
        if wait <= 0:
            due.add((child.kind, child.name))
        else:
            waits.append(wait)
    return frozenset(due), min(waits, default=None)


def is_as_desired(current: KubeObject, desired: KubeObject) -> bool:
    """Return whether an object contains everything in `desired`, and nothing more where additions are not allowed.

    Others may add labels, annotations, owners and keys of a ConfigMap's data. Any other field, such as a selector or a
    list of rules, must equal the desired one, because an addition would change its meaning.
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
