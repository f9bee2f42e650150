"""Two worlds for stories: a cluster in memory for each, and one real control plane for all, with a namespace for each.

    @pytest.mark.worlds("memory")           in memory; on the real control plane in `make soak` only
    @pytest.mark.worlds("memory", "real")   on both in every run
    @pytest.mark.worlds("memory", only=True)   in memory only: it would take minutes or hours on the real one
    no mark                                 on the real control plane only

The real one, and a real Ray in the place of head pods, end with this package: idle, they would still take processor time
from the tests after it.
"""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.controlplane import operator_process, scripted_trainer
from tests.controlplane.in_process import operators
from tests.controlplane.live_training import LiveTraining, Plane
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.scenarios import LIFE, SCENARIOS
from tests.controlplane.story_place import StoryPlace
from tests.controlplane.sweep import Sweep, clear, on_the_real_plane
from tests.profiles import SOAK
from tests.testbed import binaries
from tests.testbed.control_plane import ControlPlane
from tests.testbed.control_plane import control_plane as start_control_plane
from tests.testbed.ray_head import RayHead
from tests.testbed.ray_head import ray_head as start_ray_head
from tests.virtual.operators import VirtualOperator, virtual_plane
from tests.virtual.ray_jobs import ScriptedJobs
from tests.virtual.stages import in_memory

FOLDER = Path(__file__).parent
MEMORY, REAL = "memory", "real"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("worlds")
    if mark is not None:
        both = MEMORY in mark.args and not mark.kwargs.get("only")
        metafunc.parametrize("world", [MEMORY, REAL] if both else mark.args, indirect=True)


def world_of(item: pytest.Item) -> str:
    """The world of a test: memory or real."""
    if "memory_sweep" in getattr(item, "fixturenames", ()):
        return MEMORY
    return str(item.callspec.params.get("world", REAL)) if hasattr(item, "callspec") else REAL


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the real control plane, stories that are not marked for it run in `make soak` only. Stories in memory come first. On the real control plane, tests without the shared operator come first, so that it starts
    once. Those with a real Ray come last: from its start on it answers for the head pods of every story, and each of their jobs
    costs it a process.
    """
    for item in items:
        mark = item.get_closest_marker("worlds")
        if mark is not None and world_of(item) not in mark.args:
            item.add_marker(pytest.mark.soak)
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(FOLDER)]
    ordered = sorted((items[place] for place in places), key=_needs)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _needs(item: pytest.Item) -> tuple[bool, bool, bool]:
    fixtures = getattr(item, "fixturenames", ())
    return world_of(item) == REAL, bool({"ray_head", "ray_jobs"} & set(fixtures)), "shared_operator" in fixtures


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[StoryPlace]:
    """The world of this story."""
    if getattr(request, "param", REAL) == REAL:
        yield StoryPlace(request.getfixturevalue("control_plane"))
        return
    with virtual_plane() as (plane, operators):
        yield StoryPlace(plane, operators)


@pytest.fixture(scope="package")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Kubernetes with our definition, KubeRay and six nodes of kwok. What a test takes away, it brings back."""
    with start_control_plane(binaries.find(), tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture
def namespace(world: StoryPlace) -> Iterator[str]:
    """A fresh namespace that takes pods. What makes pods is deleted at the end."""
    with fresh_namespace(world.plane, f"test-{secrets.token_hex(4)}") as name:
        yield name


@contextmanager
def fresh_namespace(plane: Plane, name: str) -> Iterator[str]:
    """A new namespace that takes pods. What makes pods is deleted at the end."""
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
    if not isinstance(plane, ControlPlane):
        yield name
        return
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    # Its watches back off for up to a minute when the API server has been away.
    plane.processes.wait("kube-controller-manager", lambda: plane.api.exists(account))
    yield name
    clear(plane, name)


@pytest.fixture(scope="package")
def ray_head(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """A Ray that answers for every head pod, and whose jobs run on this machine."""
    if control_plane.pods.unreachable:
        pytest.skip(control_plane.pods.unreachable)
    with start_ray_head(tmp_path_factory.mktemp("ray-head")) as head:
        plane = control_plane
        head.command("qwen35", scripted_trainer.command(sys.executable, plane.server, plane.ca, plane.token))
        yield head


@pytest.fixture
def ray_jobs(world: StoryPlace, request: pytest.FixtureRequest) -> None:
    """Ray answers for head pods, and jobs run: in a real Ray, or in memory."""
    if world.operators is None:
        request.getfixturevalue("ray_head")
    else:
        world.operators.plane.ray_jobs.dashboards = ScriptedJobs(world.operators.plane.server)


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
def shared_operator(world: StoryPlace, shared: Shared, request: pytest.FixtureRequest) -> OperatorProcess | None:
    """Started by the first test that needs it after one that does not. None in memory, where every story has its own."""
    if world.operators is not None:
        return None
    if shared.running is None:
        rights: Path = request.getfixturevalue("operator_rights")
        shared.running = operator_process.process(request.getfixturevalue("control_plane"), rights)
        shared.running.start()
    return shared.running


@pytest.fixture(autouse=True)
def _two_operators_never_act(request: pytest.FixtureRequest, shared: Shared) -> None:
    """A test that brings an operator of its own, or none, is not disturbed by the shared one."""
    if world_of(request.node) == REAL and "shared_operator" not in request.fixturenames:
        shared.end()


@pytest.fixture
def operator(world: StoryPlace, shared_operator: OperatorProcess | None) -> OperatorProcess | VirtualOperator:
    """The operator, everywhere. Modules that need another one have a fixture of this name."""
    if world.operators is None:
        assert shared_operator is not None
        return shared_operator
    own = world.operators.operator()
    own.start()
    return own


@pytest.fixture
def live_training(world: StoryPlace, operator: OperatorProcess | VirtualOperator, namespace: str) -> LiveTraining:
    """A training of a namespace that the operator serves."""
    return LiveTraining(world.plane, namespace)


@pytest.fixture(scope="package")
def endings() -> dict[str, Any]:
    """The endings of undisturbed scenarios, for all modules that disturb them."""
    return {}


@pytest.fixture(scope="module")
def memory_sweep() -> Sweep:
    """Runs scenarios in memory, one after the other. Tests call `calm` with the scenarios that they need."""
    return Sweep(in_memory, side_by_side=1)


@pytest.fixture(scope="module")
def sweep(control_plane: ControlPlane, endings: dict[str, Any], shared: Shared) -> Iterator[Sweep]:
    """Runs scenarios with operators that can be disturbed, see proxy.py."""
    shared.end()
    with operators(control_plane) as serving:
        recording = Sweep(on_the_real_plane(control_plane, serving), endings)
        recording.calm([LIFE, *SCENARIOS] if SOAK else [LIFE])
        yield recording
