"""Detects drift: children that somebody has changed since the operator last wrote them.

    own write: version 7 ─► the watch reports version 9 ─► read ─┬─► as desired: version 9 is known from now on
                                                                 └─► differs: apply ─► version 10

Every change of an object changes its resourceVersion. The operator therefore detects a change by the version, and
watches only the metadata of most kinds. A changed child is read, and repaired if it differs from the desired object.
After a start, the operator knows none of its own writes. It then reads the children of every running training once, and
so also finds changes from the time when no operator ran. These reads begin REPORTS_FIRST_SECONDS after the start and are spread,
because a new leader of 500 running trainings would otherwise send 3,000 requests before it serves the reports that nobody has
served since the last leader. A child that has changed since some seconds before the last leader's end is read immediately
(`Election.known_version`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.kube.object_records import Child
from qwen35_operator.reconcile.even_spread import fraction
from qwen35_operator.reconcile.observed import ChildKey

REPAIR_SECONDS = 10.0
"""Minimum time between two reads or repairs of an object.

Without this limit, a controller that undoes every repair would keep the operator and the API server busy.
"""
REPORTS_FIRST_SECONDS, FIRST_READS_SECONDS = 10.0, 50.0
"""Time after the start from which, and within which, the children of running trainings are read for the first time."""
MAX_FIRST_READS_PER_SECOND = 15.0
"""Maximum rate of these reads of NetworkPolicies, and of all other children together. With more than 600 running trainings
the NetworkPolicies take longer than until FIRST_READS_SECONDS, and with more than 120 the others."""
OTHER_CHILDREN = 5
"""Number of children of a training that are read, besides its NetworkPolicy and a PodDisruptionBudget, which few trainings have."""
SHARED_FIELDS = ("labels", "annotations")
"""Metadata in which other managers may have entries of their own."""


@dataclass(frozen=True)
class Start:
    """The start of a process that leads.

    known_version: the resourceVersion up to which an earlier leader has usually acted on changes. Those of all kinds are numbers of
    one sequence. running: number of all running trainings.
    """

    time: datetime
    known_version: int
    running: int

    def first_read(self, child: Child) -> datetime:
        """Return when a child of a running training is read for the first time, if it has not changed since `known_version`.

        The order of the trainings differs from start to start, so that none is always the last.
        """
        reads = self.running * (1 if child.kind == "NetworkPolicy" else OTHER_CHILDREN)
        seconds = max(FIRST_READS_SECONDS - REPORTS_FIRST_SECONDS, reads / MAX_FIRST_READS_PER_SECOND)
        place = fraction(f"{child.owner} {self.time.timestamp()}")
        return self.time + timedelta(seconds=REPORTS_FIRST_SECONDS + place * seconds)


def drifted(
    children: Iterable[Child], now: datetime, start: Start | None = None
) -> tuple[frozenset[ChildKey], float | None]:
    """Return the child objects to check now, and the seconds until further ones have to be checked.

    The seconds are None if no further object has changed. children: those that only the operator writes, so without the
    ConfigMaps that the trainer writes. start: the start of this process, if children that it has not written or checked yet may
    wait (`Start.first_read`); None if they are checked now.
    """
    due: set[ChildKey] = set()
    waits: list[float] = []
    for child in children:
        last = child.own_write
        if child.deleting is not None or (last is not None and last.version == child.version):
            continue
        if last is not None:
            due_at = last.time + timedelta(seconds=REPAIR_SECONDS)
        elif start is not None and int(child.version) <= start.known_version:
            due_at = start.first_read(child)
        else:
            due_at = now
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
