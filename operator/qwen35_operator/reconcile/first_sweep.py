"""Returns the order in which a process that begins to lead reconciles all trainings, because nobody has since the last leader.

    starts, stops or waits · has pods · has a change to act on ─► runs ─► at rest

Most trainings of an organisation are at rest. A new leader of 500 running trainings with 4,500 at rest finds reports that nobody has
served for 10 s, and would serve them seconds later if it reconciled all trainings at the same time.
"""

from collections.abc import Mapping
from typing import NamedTuple

from qwen35_operator.kube.kinds import POD, RAY_CLUSTER, ObjectKind
from qwen35_operator.kube.object_records import ObjectRecord, RayJob
from qwen35_operator.kube.store import Store, TrainingKey
from qwen35_operator.kube.trainings import RESTING_STATES, Trainings
from qwen35_operator.reconcile.even_spread import fraction


class FirstSweep(NamedTuple):
    """All trainings, each in one of the two groups, in the order in which they are reconciled."""

    active: tuple[TrainingKey, ...] = ()
    at_rest: tuple[TrainingKey, ...] = ()
    """In an order that differs from leader to leader, so that none is always the last."""


def first_sweep(trainings: Trainings, stores: Mapping[ObjectKind, Store], known_version: int) -> FirstSweep:
    """Return the order in which a new leader reconciles all trainings.

    A training is at rest if it is suspended or has ended, its status answers its spec, it has neither pods nor a RayJob that may start
    some, and neither it nor one of its objects has changed since `known_version`. stores: the known objects of trainings, by kind.
    known_version: a resourceVersion shortly before the end of the last leader (`Election.known_version`).
    """
    resting = {key for key in trainings if _is_at_rest(key, trainings, stores, known_version)}
    active = (key for key in trainings.by_urgency() if key not in resting)
    return FirstSweep(
        active=tuple(sorted(active, key=lambda key: trainings.state(key) == "Running")),
        at_rest=tuple(sorted(resting, key=lambda key: fraction(f"{key} {known_version}"))),
    )


def _is_at_rest(key: TrainingKey, trainings: Trainings, stores: Mapping[ObjectKind, Store], known_version: int) -> bool:
    if trainings.state(key) not in RESTING_STATES or not trainings.is_served(key):
        return False
    if trainings.version(key) > known_version:
        return False
    return not any(
        _needs_attention(kind, record, known_version) for kind, store in stores.items() for record in store.of(key)
    )


def _needs_attention(kind: ObjectKind, record: ObjectRecord, known_version: int) -> bool:
    """Return whether an object of a training that has ended or is suspended occupies nodes, may do so, or has changed."""
    may_have_pods = kind in (POD, RAY_CLUSTER) or (isinstance(record, RayJob) and not record.ended)
    return may_have_pods or int(record.version) > known_version
