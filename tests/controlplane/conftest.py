"""One control plane for all tests, a namespace for each, and a real Ray in the place of head pods.

All of them end with this package: idle, they would still take processor time from the tests after it.
"""

import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.controlplane import operator_process, scripted_trainer
from tests.controlplane.in_process import operators
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.scenarios import LIFE, SCENARIOS
from tests.controlplane.sweep import Sweep, clear
from tests.profiles import SOAK
from tests.testbed import binaries
from tests.testbed.control_plane import ControlPlane
from tests.testbed.control_plane import control_plane as start_control_plane
from tests.testbed.ray_head import RayHead
from tests.testbed.ray_head import ray_head as start_ray_head

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without the shared operator come first, so that it starts once. Those with a real Ray come last: from its start on it
    answers for the head pods of every story, and each of their jobs costs it a process.
    """
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(FOLDER)]
    ordered = sorted((items[place] for place in places), key=_needs)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _needs(item: pytest.Item) -> tuple[bool, bool]:
    fixtures = getattr(item, "fixturenames", ())
    return "ray_head" in fixtures, "shared_operator" in fixtures


@pytest.fixture(scope="package")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Kubernetes with our definition, KubeRay and six nodes of kwok. What a test takes away, it brings back."""
    with start_control_plane(binaries.find(), tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace that takes pods. What makes pods is deleted at the end."""
    name = f"test-{secrets.token_hex(4)}"
    control_plane.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    # Its watches back off for up to a minute when the API server has been away.
    control_plane.processes.wait("kube-controller-manager", lambda: control_plane.api.exists(account))
    yield name
    clear(control_plane, name)


@pytest.fixture(scope="package")
def ray_head(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """A Ray that answers for every head pod, and whose jobs run on this machine."""
    if control_plane.pods.unreachable:
        pytest.skip(control_plane.pods.unreachable)
    with start_ray_head(tmp_path_factory.mktemp("ray-head")) as head:
        plane = control_plane
        head.command("qwen35", scripted_trainer.command(sys.executable, plane.server, plane.ca, plane.token))
        yield head


@pytest.fixture(scope="package")
def operator_rights(control_plane: ControlPlane) -> Path:
    """A kubeconfig with what the operator's role grants, everywhere."""
    return operator_process.user(control_plane, operator_process.rules())


@dataclass
class Shared:
    """The operator of all tests that bring none of their own. Ended by SIGTERM."""

    running: OperatorProcess | None = None

    def end(self) -> None:
        if self.running is not None:
            self.running.stop()
            self.running = None


@pytest.fixture(scope="package")
def shared() -> Iterator[Shared]:
    kept = Shared()
    yield kept
    kept.end()


@pytest.fixture
def shared_operator(control_plane: ControlPlane, operator_rights: Path, shared: Shared) -> OperatorProcess:
    """Started by the first test that needs it after one that does not."""
    if shared.running is None:
        shared.running = operator_process.process(control_plane, operator_rights)
        shared.running.start()
    return shared.running


@pytest.fixture(autouse=True)
def _two_operators_never_act(request: pytest.FixtureRequest, shared: Shared) -> None:
    """A test that brings an operator of its own, or none, is not disturbed by the shared one."""
    if "shared_operator" not in request.fixturenames:
        shared.end()


@pytest.fixture
def operator(shared_operator: OperatorProcess) -> OperatorProcess:
    """The operator, everywhere. Modules that need another one have a fixture of this name."""
    return shared_operator


@pytest.fixture
def live_training(control_plane: ControlPlane, operator: OperatorProcess, namespace: str) -> LiveTraining:
    """A training of a namespace that the operator serves."""
    return LiveTraining(control_plane, namespace)


@pytest.fixture(scope="package")
def endings() -> dict[str, Any]:
    """The endings of undisturbed scenarios, for all modules that disturb them."""
    return {}


@pytest.fixture(scope="module")
def sweep(control_plane: ControlPlane, endings: dict[str, Any], shared: Shared) -> Iterator[Sweep]:
    """Runs scenarios with operators that can be disturbed, see proxy.py."""
    shared.end()
    with operators(control_plane) as serving:
        recording = Sweep(control_plane, serving, endings)
        recording.calm([LIFE, *SCENARIOS] if SOAK else [LIFE])
        yield recording
