"""Which trainings a new leader reconciles first, and which may wait."""

import pytest

from qwen35_operator.desired.object_names import RETRY
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_CLUSTER, RAY_JOB, WATCHED, ObjectKind
from qwen35_operator.kube.object_parsing import record
from qwen35_operator.kube.object_records import Child
from qwen35_operator.kube.store import Store
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.reconcile.first_sweep import first_sweep

KNOWN = 100
"""The version that the last leader has noted."""


class Fleet:
    """Trainings of one namespace, with their objects."""

    def __init__(self) -> None:
        self.trainings = Trainings()
        self.stores: dict[ObjectKind, Store] = {kind: Store() for kind in WATCHED}

    def training(self, name: str, state: str | None, version: int = 1, retry: str = "", **metadata) -> None:
        identity = {"namespace": "team", "name": name, "uid": name, "resourceVersion": str(version), "generation": 3}
        status = {} if state is None else {"state": state, "observedGeneration": 3, "retry": retry}
        self.trainings.put({"metadata": identity | metadata, "spec": {}, "status": status})

    def child(self, training: str, kind: ObjectKind, version: int = 1) -> None:
        name = f"{training}-child"
        self.stores[kind].put(training, Child(kind.name, name, "team", name, str(version), training, None, None))

    def job(self, training: str, deployment: str) -> None:
        raw = {"metadata": {"name": f"{training}-1", "namespace": "team", "uid": "j", "resourceVersion": "1"}}
        raw["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        self.stores[RAY_JOB].put(
            training, record(RAY_JOB, raw | {"spec": {}, "status": {"jobDeploymentStatus": deployment}})
        )

    def sweep(self) -> tuple[list[str], list[str]]:
        """The names of active trainings and of those at rest, in their order."""
        active, at_rest = first_sweep(self.trainings, self.stores, KNOWN)
        return [name for _, name in active], [name for _, name in at_rest]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_trainings_that_start_or_stop_come_first_and_then_those_that_run_and_those_at_rest_may_wait(fleet) -> None:
    states = {"a": "Succeeded", "b": "Running", "c": "Failed", "d": None, "e": "Suspending", "f": "Suspended"}
    for version, (name, state) in enumerate(states.items()):
        fleet.training(name, state, version)
    active, at_rest = fleet.sweep()
    assert active == ["d", "e", "b"]
    assert set(at_rest) == {"a", "c", "f"}


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
        fleet.child(name, CONFIG_MAP, version)
    assert fleet.sweep() == (["changed"], ["known"])


@pytest.mark.parametrize("kind", [POD, RAY_CLUSTER])
def test_a_training_that_still_occupies_nodes_is_not_at_rest_however_long_ago_it_ended(fleet, kind) -> None:
    """The next leader continues the wait for its end, and then deletes its RayJob."""
    fleet.training("stalled", "Failed")
    fleet.child("stalled", kind)
    assert fleet.sweep() == (["stalled"], [])


@pytest.mark.parametrize(("deployment", "is_at_rest"), [("Complete", True), ("Suspended", False), ("", False)])
def test_a_training_whose_job_may_still_start_pods_is_not_at_rest(fleet, deployment, is_at_rest) -> None:
    fleet.training("failed", "Failed")
    fleet.job("failed", deployment)
    assert fleet.sweep() == (([], ["failed"]) if is_at_rest else (["failed"], []))


REQUESTS = {
    "resumed": {"generation": 4},
    "deleted": {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    "tried again": {"annotations": {RETRY: "2"}},
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_that_the_last_leader_saw_but_did_not_serve_comes_before_trainings_that_run(fleet, request_) -> None:
    """As when a webhook has refused the write for longer than the last leader remembers versions."""
    fleet.training("runs", "Running")
    fleet.training("asked", "Failed", retry="1", **REQUESTS[request_])
    fleet.training("served", "Failed", retry="1", annotations={RETRY: "1"})
    assert fleet.sweep() == (["asked", "runs"], ["served"])


def test_the_order_of_trainings_at_rest_differs_from_leader_to_leader(fleet) -> None:
    for number in range(20):
        fleet.training(f"t{number}", "Succeeded")
    versions = range(KNOWN, KNOWN + 10)
    last = {first_sweep(fleet.trainings, fleet.stores, version).at_rest[-1] for version in versions}
    assert len(last) > 2
