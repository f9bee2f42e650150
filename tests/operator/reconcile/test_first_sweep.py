"""Which trainings a new leader reconciles first, and which may wait."""

import pytest

from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_CLUSTER, RAY_JOB, WATCHED, ObjectKind
from qwen35_operator.kube.object_records import Child
from qwen35_operator.kube.store import Store
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.reconcile.first_sweep import first_sweep

KNOWN = 100
"""The version up to which the last leader has acted on changes."""


class Fleet:
    """Trainings of one namespace, with their objects."""

    def __init__(self) -> None:
        self.trainings = Trainings()
        self.stores: dict[ObjectKind, Store] = {kind: Store() for kind in WATCHED}

    def training(self, name: str, state: str | None, version: int = 1) -> None:
        metadata = {"namespace": "team", "name": name, "uid": name, "resourceVersion": str(version)}
        status = {} if state is None else {"status": {"state": state}}
        self.trainings.put({"metadata": metadata, "spec": {}} | status)

    def child(self, training: str, kind: ObjectKind, version: int = 1) -> None:
        name = f"{training}-child"
        self.stores[kind].put(training, Child(kind.name, name, "team", name, str(version), training, None, None))

    def sweep(self) -> tuple[list[str], list[str]]:
        """The names of those in motion and at rest, in their order."""
        in_motion, at_rest = first_sweep(self.trainings, self.stores, KNOWN)
        return [name for _, name in in_motion], [name for _, name in at_rest]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_trainings_that_start_or_stop_come_first_and_then_those_that_run_and_those_at_rest_may_wait(fleet) -> None:
    states = {"a": "Succeeded", "b": "Running", "c": "Failed", "d": None, "e": "Suspending", "f": "Suspended"}
    for version, (name, state) in enumerate(states.items()):
        fleet.training(name, state, version)
    assert fleet.sweep() == (["d", "e", "b"], ["f", "c", "a"])


@pytest.mark.parametrize("state", ["Suspended", "Succeeded", "Failed"])
def test_a_training_that_changed_after_the_last_leader_looked_is_not_at_rest(fleet, state) -> None:
    """As one that a user has resumed, deleted, or ordered to try again while nobody led."""
    fleet.training("runs", "Running")
    fleet.training("known", state, KNOWN)
    fleet.training("changed", state, KNOWN + 1)
    assert fleet.sweep() == (["changed", "runs"], ["known"])


def test_a_training_whose_object_changed_after_the_last_leader_looked_is_not_at_rest(fleet) -> None:
    for name, version in {"known": KNOWN, "changed": KNOWN + 1}.items():
        fleet.training(name, "Succeeded")
        fleet.child(name, RAY_JOB)
        fleet.child(name, CONFIG_MAP, version)
    assert fleet.sweep() == (["changed"], ["known"])


@pytest.mark.parametrize("kind", [POD, RAY_CLUSTER])
def test_a_training_that_still_occupies_nodes_is_not_at_rest_however_long_ago_it_ended(fleet, kind) -> None:
    """The next leader continues the wait for its end, and then deletes its RayJob."""
    fleet.training("stalled", "Failed")
    fleet.child("stalled", kind)
    assert fleet.sweep() == (["stalled"], [])


def test_the_training_that_ended_last_is_the_first_of_those_at_rest(fleet) -> None:
    for name, version in {"old": 5, "new": 90, "middle": 20}.items():
        fleet.training(name, "Succeeded", version)
    assert fleet.sweep() == ([], ["new", "middle", "old"])
