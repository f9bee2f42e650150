"""A Kubernetes control plane with KubeRay on nodes of kwok, on loopback, from nothing.

    etcd ─► API server ─┬─► controller manager, scheduler, kwok ───────────┐
                        ├─► our definition, nodes ─────────────────────────┼─► ready
                        └─► KubeRay's definitions and role ─► its operator ┘

Everything below the API server starts side by side. Whatever was started ends with this process, see supervisor.py.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.patience import PATIENCE
from tests.testbed import core, kuberay, kwok, pods
from tests.testbed.binaries import Binaries
from tests.testbed.certificates import ADMINISTRATORS
from tests.testbed.core import Core
from tests.testbed.kuberay import KubeRay
from tests.testbed.pods import PodNetwork
from tests.testbed.processes import Processes

OUR_DEFINITION = Path(__file__).parents[2] / "crds" / "rl.qwen35.io_qwen35trainings.yaml"


@dataclass(frozen=True)
class ControlPlane(Core):
    """With KubeRay, and with nodes and pods that are none."""

    kuberay: KubeRay
    pods: PodNetwork

    def stop_kuberay(self) -> None:
        self.kuberay.stop()

    def start_kuberay(self, *options: str) -> None:
        """Returns once it is ready. options: further flags of its operator."""
        self.kuberay.start(*options)

    @contextmanager
    def kubelets_away(self) -> Iterator[None]:
        """Nobody starts pods, or confirms their end: kwok does both immediately, kubelets take their time."""
        (process,) = psutil.Process(self.processes.running[kwok.NAME].pid).children()
        process.suspend()
        try:
            # The thread that takes the signal may have to wait for a core, and the others continue until then.
            until = time.monotonic() + PATIENCE
            while not _is_stopped(process):
                assert time.monotonic() < until, "kwok never stops"
                time.sleep(0.05)
            yield
        finally:
            process.resume()


@contextmanager
def control_plane(
    binaries: Binaries, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[ControlPlane]:
    """Starts all in an empty folder, which also gets the logs. Raises NotReady, naming who and showing its log.

    environment: further variables of every process.
    """
    processes = Processes(folder, environment or {})
    try:
        yield _start(binaries, folder, processes)
    finally:
        processes.stop_all()


def _start(binaries: Binaries, folder: Path, processes: Processes) -> ControlPlane:
    network = pods.start(processes, folder)
    begun = core.start(binaries, folder, processes)
    operator = KubeRay(binaries, processes, begun.kubeconfig_for(kuberay.NAME))
    plane = ControlPlane(**vars(begun), kuberay=operator, pods=network)
    _start_on(plane)
    return plane


def _start_on(plane: ControlPlane) -> None:
    """All that needs the API server."""

    def definitions_then_kuberay() -> None:
        # Each is about a megabyte, and the API server processes all of them together.
        list(workers.map(partial(kuberay.define, plane.api), plane.binaries.kuberay_definitions))
        kuberay.grant(plane.api, plane.binaries)
        plane.wait_until_defined(*plane.binaries.kuberay_definitions)
        plane.start_kuberay()

    with ThreadPoolExecutor(16) as workers:
        steps = [
            workers.submit(step)
            for step in (
                definitions_then_kuberay,
                plane.start_controllers,
                plane.start_scheduler,
                lambda: _start_nodes(plane),
                lambda: plane.api.define(OUR_DEFINITION),
            )
        ]
        for step in steps:
            step.result()
    plane.wait_until_defined(OUR_DEFINITION)


def _start_nodes(plane: ControlPlane) -> None:
    own = plane.kubeconfig_for(kwok.NAME, [ADMINISTRATORS])
    kwok.start(plane.binaries, plane.processes, own, plane.pods.network)
    kwok.add_nodes(plane.api)
    plane.processes.wait(kwok.NAME, lambda: kwok.nodes_ready(plane.api))


def _is_stopped(process: psutil.Process) -> bool:
    """Whether none of its threads runs."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
