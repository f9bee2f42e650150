"""One real node: containerd, kubelet, kube-proxy and CoreDNS, in a network and with mounts of its own.

namespaces ─► containerd ─► kubelet ─► Ready
     └──────► kube-proxy, CoreDNS
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups
from tests.cluster.containerd import Containerd
from tests.cluster.kubelet import NODE, Kubelet
from tests.cluster.namespaces import Namespaces
from tests.cluster.services import Services
from tests.testbed.core import Core
from tests.testbed.processes import Processes

REPOSITORY = Path(__file__).parents[2]
NAMESPACES = "namespaces"


def make_namespaces(processes: Processes) -> Namespaces:
    """The place for a node. It comes before the API server, which listens on its side of this machine."""
    file = processes.folder / "namespaces.json"
    command = [sys.executable, "-m", "tests.cluster.namespaces", str(file)]
    processes.start(NAMESPACES, command, environment={"PYTHONPATH": str(REPOSITORY)}, grace=5)
    processes.wait(NAMESPACES, file.exists)
    return Namespaces(**json.loads(file.read_text()))


@dataclass(frozen=True)
class Node:
    core: Core
    containerd: Containerd
    kubelet: Kubelet
    services: Services

    @classmethod
    def create(cls, core: Core, namespaces: Namespaces, containerd: Containerd, cgroup: str) -> "Node":
        cgroups.create(cgroup)
        kubelet = Kubelet(core.folder / "kubelet", core, namespaces, containerd, cgroup)
        return cls(core, containerd, kubelet, Services(core.folder, core, namespaces))

    @property
    def name(self) -> str:
        return NODE

    def offer(self, devices: Mapping[str, int]) -> None:
        """Advertises devices that are none, like 8 of `nvidia.com/gpu`: what schedules by them cannot tell."""
        counts = {name: str(count) for name, count in devices.items()}
        patch = {"status": {"capacity": counts, "allocatable": counts}}
        self.core.api.request(
            "PATCH", f"/api/v1/nodes/{NODE}/status", patch, content="application/strategic-merge-patch+json"
        )
