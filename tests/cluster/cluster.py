"""A cluster of one real node: our control plane, containerd and kubelet, KubeRay in a pod.

    namespaces ─┬─► etcd, API server ─┬─► controllers, scheduler ───────────┐
                │                     ├─► kube-proxy, CoreDNS ──────────────┼─► ready
                └─► containerd ───────┼─► kubelet ──┬──► KubeRay's pod ─────┘
                         └────────────┼─► images ───┘
                                      └─► KubeRay's manifests

Everything lies in one folder, and whatever is left elsewhere is named by a record, see record.py.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import kuberay, node, programs, store
from tests.cluster.containerd import Containerd
from tests.cluster.node import Node
from tests.cluster.record import Record, recorded, remove_leftovers
from tests.testbed import core
from tests.testbed.binaries import Binaries
from tests.testbed.core import Core
from tests.testbed.processes import Processes


@dataclass(frozen=True)
class Cluster(Core):
    """What tests get: a control plane's ways to talk to it and to take parts away, and the node."""

    record: Record
    node: Node


@contextmanager
def cluster(binaries: Binaries, name: str, images: Sequence[str] = ()) -> Iterator[Cluster]:
    """Starts one of this name that has these images of ours, after removing what killed ones left.

    Raises Taken, NotReady, NotBuildable and NotImported.
    """
    remove_leftovers()
    with recorded(name) as record:
        processes = Processes(Path(record.folder), record.environment)
        try:
            yield _start(binaries, record, processes, images)
        finally:
            processes.stop_all()


def _start(binaries: Binaries, record: Record, processes: Processes, images: Sequence[str]) -> Cluster:
    folder = Path(record.folder)
    namespaces = node.make_namespaces(processes)
    containerd = Containerd(folder / "containerd", processes, namespaces)

    def runtime() -> None:
        store.start(containerd, images)
        programs.load(containerd, binaries)

    with ThreadPoolExecutor(8) as workers:
        running = workers.submit(runtime)
        begun = core.start(binaries, folder, processes, namespaces.host)
        own = Node.create(begun, namespaces, containerd, record.cgroup)
        starting = (
            begun.start_controllers,
            begun.start_scheduler,
            own.services.start_names,
            lambda: kuberay.install(begun),
        )
        steps = [workers.submit(step) for step in starting]
        running.result()
        # Together: the proxy waits for the node, but not for long.
        steps += [workers.submit(step) for step in (own.kubelet.start, own.services.start_proxy)]
        for step in steps:
            step.result()
    processes.wait("kubelet", lambda: kuberay.ready(begun))
    return Cluster(**vars(begun), record=record, node=own)
