"""Returns the order in which a process that begins to lead reconciles all trainings, because nobody has since the last leader.

    starts, stops, waits, has ended with pods, or changed since the last leader ─► runs ─► at rest

Most trainings of an organisation are at rest. A new leader of 500 running trainings with 4,500 at rest finds reports that nobody has
served for 10 s, and would serve them seconds later if it reconciled all trainings at the same time.
"""

from collections.abc import Mapping
from typing import NamedTuple

from qwen35_operator.kube.kinds import POD, RAY_CLUSTER, ObjectKind
from qwen35_operator.kube.store import Store, TrainingKey
from qwen35_operator.kube.trainings import Trainings

RESTING_STATES = ("Suspended", "Succeeded", "Failed")
"""States in which a training waits until somebody changes it, or until its objects are old enough to be deleted."""


class FirstSweep(NamedTuple):
    """All trainings, each in one of the two groups, in the order in which they are reconciled."""

    in_motion: tuple[TrainingKey, ...]
    at_rest: tuple[TrainingKey, ...]
    """Trainings without pods that the last leader has left in a resting state, the last changed one first."""


def first_sweep(trainings: Trainings, stores: Mapping[ObjectKind, Store], known_version: int) -> FirstSweep:
    """Return the order in which a new leader reconciles all trainings.

    stores: the known objects of trainings, by kind. known_version: the resourceVersion up to which the last leader has acted on changes
    (`Election.known_version`).
    """
    waiting: list[TrainingKey] = []
    running: list[TrainingKey] = []
    at_rest: list[TrainingKey] = []
    for key in trainings:
        state = trainings.state(key)
        if state == "Running":
            running.append(key)
        elif state not in RESTING_STATES or _is_unsettled(key, trainings, stores, known_version):
            waiting.append(key)
        else:
            at_rest.append(key)
    at_rest.sort(key=trainings.version, reverse=True)
    return FirstSweep((*waiting, *running), tuple(at_rest))


def _is_unsettled(
    key: TrainingKey, trainings: Trainings, stores: Mapping[ObjectKind, Store], known_version: int
) -> bool:
    """Return whether the training or one of its objects has changed since `known_version`, or pods are left that occupy nodes."""
    if trainings.version(key) > known_version:
        return True
    return any(
        kind in (POD, RAY_CLUSTER) or int(record.version) > known_version
        for kind, store in stores.items()
        for record in store.of(key)
    )
