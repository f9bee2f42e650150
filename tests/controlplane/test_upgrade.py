"""An upgrade from the last recorded release by Helm, a rollback, and the upgrade again disturb no training.

    install the recorded chart ─► upgrade ─► roll back ─► upgrade ─► a later definition
    trainings begin         another begins   a pool grows   a pool grows   the suspended one is resumed

On a live control plane. As in a cluster, Helm replaces definition, rights and policies while the operator before still runs; then
that one ends by SIGTERM, and the operator of the other release starts with the chart's account. The recorded release runs from its own
packages (`tests/upgrade/recordings`). The later definition is what a failed upgrade leaves, or a rollback without the definition.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from qwen35_operator.api import crd
from tests.controlplane import chart_release, operator_process
from tests.controlplane.chart_release import Release
from tests.controlplane.live_training import CHILDREN, LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.helm.conftest import CHART
from tests.testbed.control_plane import OUR_DEFINITION, ControlPlane
from tests.upgrade.recording import releases

SAVED = {"uri": "/checkpoints/update-000001", "update": 1}
RUN_BY = ("rayjobs", "rayclusters", "pods")
"""Kinds of the objects in which an attempt runs."""
LATER_FIELD = "fieldOfALaterVersion"
RECORDED = ("number", "outcome", "reason", "counted", "startTime", "endTime")
"""Fields of an attempt in the status that never change once they are set."""


@dataclass(frozen=True)
class Picture:
    """What an upgrade must leave as it is: in what a training runs, its state, and how it got there."""

    runs_in: Mapping[str, list[tuple[str, str, int | None]]]
    """Kind → name, uid and, where the kind has one, generation of each object. They change if an object is replaced or its spec is written."""
    status: Mapping[str, Any]
    children: frozenset[tuple[str, str]]
    """Name and uid of each child."""

    @classmethod
    def of(cls, training: LiveTraining) -> "Picture":
        status = training.status
        attempts = [{name: attempt.get(name) for name in RECORDED} for attempt in status["attempts"]]
        return cls(
            {kind: sorted(map(_identity, training.mine(kind))) for kind in RUN_BY},
            {"attempts": attempts} | {name: status.get(name) for name in ("state", "restarts", "lastCheckpoint")},
            frozenset(_identity(body)[:2] for kind in CHILDREN for body in training.mine(kind)),
        )

    def without_children_since(self, earlier: "Picture") -> "Picture":
        """This picture without the children that an earlier one does not have: a release may add some."""
        return replace(self, children=self.children & earlier.children)


@dataclass
class Trainings:
    """Trainings of one namespace, of which each has got somewhere else."""

    plane: ControlPlane
    namespace: str
    running: dict[str, int] = field(default_factory=dict)
    """Name of each training that runs → its attempt."""
    reported: int = 1
    """Number of updates that the trainers have reported."""

    def of(self, name: str) -> LiveTraining:
        return LiveTraining(self.plane, self.namespace, name)

    @property
    def names(self) -> list[str]:
        listed = self.plane.api.get(self.of("any").path("qwen35trainings", None))["items"]
        return sorted(body["metadata"]["name"] for body in listed)

    def begin(self, name: str, **sections: Any) -> LiveTraining:
        """Create a training that trains."""
        training = self.of(name).apply(**sections)
        self._until_running(training, 1)
        return training

    def begin_again(self, name: str) -> None:
        """Create a training whose first attempt has failed, and whose second one trains."""
        training = self.begin(name)
        training.report("Failed", reason="WorkerLost", message="a rank is gone")
        self._until_running(training, 2)

    def suspend(self, name: str) -> None:
        """Create a training that was suspended and has saved a checkpoint."""
        training = self.begin(name)
        training.edit(suspend=True)
        training.until(lambda: training.order, "it is asked to stop")
        order, saved = (training.order or {})["id"], SAVED | {"time": self.plane.now()}
        training.report("Stopped", stopAcknowledged=order, checkpoint=saved)
        training.until_state("Suspended")
        self._until_nothing_runs(training)

    def fail(self, name: str) -> None:
        """Create a training that has failed for good."""
        training = self.begin(name, failurePolicy={"maxRestarts": 0})
        training.report("Failed", reason="WorkerLost", message="a rank is gone")
        training.until_state("Failed")
        self._until_nothing_runs(training)

    def resume(self, name: str) -> None:
        """Resume a suspended training."""
        self.of(name).edit(suspend=False)
        self._until_running(self.of(name), 2)

    def grow(self, name: str, nodes: int) -> None:
        """Let the rollout pool of a running training grow, which keeps all its pods."""
        training = self.of(name)
        before = pods(training)
        training.edit(rollout={"nodes": nodes})
        training.until_pods("rollout", nodes)
        assert before.items() <= pods(training).items()

    def pictures(self, operator: OperatorProcess) -> dict[str, Picture]:
        """A picture of each training, when the operator has nothing to do."""
        self.of("any").until(operator.rests, "the operator has looked at all trainings")
        return {name: Picture.of(self.of(name)) for name in self.names}

    def assert_undisturbed(self, before: Mapping[str, Picture], operator: OperatorProcess) -> None:
        """Each training is as it was before, after the operator has looked at all, and has seen a report of each that runs."""
        self._train_on()
        now = self.pictures(operator)
        assert now.keys() == before.keys()
        assert {name: now[name].without_children_since(picture) for name, picture in before.items()} == before

    def _train_on(self) -> None:
        """Let each trainer report another update, and wait until the operator has written it to the status."""
        self.reported += 1
        for name, attempt in self.running.items():
            self.of(name).report(attempt=attempt, update=self.reported, version=self.reported)
        for name in self.running:
            training = self.of(name)
            training.until(
                lambda training=training: training.status["progress"]["update"] == self.reported, "the report is seen"
            )

    def _until_running(self, training: LiveTraining, attempt: int) -> None:
        training.until_job(attempt)
        for pool, nodes in (("head", 1), ("train", 1), ("rollout", 2)):
            training.until_pods(pool, nodes)
        training.report(attempt=attempt, update=self.reported)
        training.until_condition("Ready", "True", "Running")
        training.until(lambda: jobs(training) == [f"{training.name}-{attempt}"], "the attempt before is gone")
        training.until(lambda: len(pods(training)) == 4, "so are its pods")
        self.running[training.name] = attempt

    def _until_nothing_runs(self, training: LiveTraining) -> None:
        training.until(lambda: not any(training.mine(kind) for kind in ("rayclusters", "pods")), "nothing of it runs")
        del self.running[training.name]


def pods(training: LiveTraining) -> dict[str, str]:
    """Name of each pod of a training → its uid."""
    return {body["metadata"]["name"]: body["metadata"]["uid"] for body in training.mine("pods")}


def jobs(training: LiveTraining) -> list[str]:
    """Names of the RayJobs of a training."""
    return [body["metadata"]["name"] for body in training.mine("rayjobs")]


def _identity(body: Mapping[str, Any]) -> tuple[str, str, int | None]:
    metadata = body["metadata"]
    return metadata["name"], metadata["uid"], metadata.get("generation")


@pytest.fixture
def recorded_packages(tmp_path: Path) -> Path:
    releases()[-1].unpack(tmp_path / "packages")
    return tmp_path / "packages"


@pytest.fixture
def release(control_plane: ControlPlane) -> Iterator[Release]:
    """The recorded chart, whose definition replaces this version's."""
    with chart_release.installed(control_plane, chart=releases()[-1].chart, defines=True) as recorded:
        yield recorded
    control_plane.api.define(OUR_DEFINITION)


@contextmanager
def operator_of(release: Release, served: str, packages: Path | None = None) -> Iterator[OperatorProcess]:
    """An operator of a release that serves one namespace. packages: of the recorded version; None: this version."""
    options = (f"--namespace={served}", f"--lease-namespace={release.namespace}", f"--lease-name={release.operator}")
    account = release.kubeconfig_of(release.operator)
    with operator_process.running(release.plane, account, *options, packages=packages) as running:
        yield running


def later_definition(folder: Path) -> Path:
    """This version's definition with another field in a section, of which every object gets the default."""
    definition = crd.render()
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["train"]["properties"][LATER_FIELD] = {
        "type": "boolean",
        "default": False,
    }
    file = folder / OUR_DEFINITION.name  # the test bed finds the definition's name there
    file.write_text(json.dumps(definition))
    return file


def test_an_upgrade_a_rollback_and_another_upgrade_disturb_no_training(
    release: Release, recorded_packages: Path, namespace: str, tmp_path: Path
):
    trainings = Trainings(release.plane, namespace)
    with operator_of(release, namespace, recorded_packages) as operator:
        trainings.begin("running")
        trainings.begin_again("restarted")
        trainings.begin("elastic")
        trainings.suspend("suspended")
        trainings.fail("failed")
        before = trainings.pictures(operator)
        release.helm("upgrade", release.name, str(CHART))
    with operator_of(release, namespace) as operator:
        trainings.assert_undisturbed(before, operator)
        trainings.begin("later")
        before = trainings.pictures(operator)
        assert operator.refused_requests() == {}
        release.helm("rollback", release.name)
    with operator_of(release, namespace, recorded_packages) as operator:
        trainings.assert_undisturbed(before, operator)
        trainings.grow("elastic", 3)
        before = trainings.pictures(operator)
        release.helm("upgrade", release.name, str(CHART))
    with operator_of(release, namespace) as operator:
        trainings.assert_undisturbed(before, operator)
        trainings.grow("elastic", 4)
        before = trainings.pictures(operator)
        release.plane.api.define(later_definition(tmp_path))
    with operator_of(release, namespace) as operator:
        trainings.assert_undisturbed(before, operator)
        trainings.resume("suspended")
        trainings.of("new").apply()
        trainings.of("new").until_condition("Accepted", "False", "Invalid")
        assert operator.refused_requests() == {}
    assert f"spec.train.{LATER_FIELD}" in trainings.of("new").whole_condition("Accepted")["message"]
    restarts = {name: trainings.of(name).restarts for name in trainings.names}
    assert restarts == {name: int(name == "restarted") for name in trainings.names}
