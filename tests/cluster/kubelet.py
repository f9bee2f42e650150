"""The kubelet."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.containerd import Containerd
from tests.cluster.namespaces import Namespaces
from tests.testbed.api import is_true
from tests.testbed.core import Core
from tests.testbed.processes import free_ports

NAME = "kubelet"
NODE = "node"
DNS = "10.96.0.10"
DOMAIN = "cluster.local"


@dataclass(frozen=True)
class Kubelet:
    folder: Path
    core: Core
    namespaces: Namespaces
    containerd: Containerd
    cgroup: str

    def start(self) -> None:
        """Returns once its node is ready."""
        self.folder.mkdir(exist_ok=True)
        configuration = self.folder / "config.json"
        if not configuration.exists():
            configuration.write_text(json.dumps(self._configuration(), indent=2))
            self.core.kubeconfig_for(f"system:node:{NODE}", ["system:nodes"])
        command = [
            self.core.binaries[NAME],
            f"--config={configuration}",
            f"--kubeconfig={self.core.folder / f'system-node-{NODE}.kubeconfig'}",
            f"--root-dir={self.folder / 'root'}",
            f"--hostname-override={NODE}",
            f"--node-ip={self.namespaces.node}",
        ]
        self.core.processes.start(NAME, self.namespaces.command(*command))
        self.core.processes.wait(NAME, self.ready)

    def stop(self) -> None:
        """Its pods run on."""
        self.core.processes.stop(NAME)

    def ready(self) -> bool:
        path = f"/api/v1/nodes/{NODE}"
        return self.core.api.exists(path) and is_true(self.core.api.get(path)["status"], "Ready")

    def _configuration(self) -> dict[str, object]:
        serving = self.core.authority.issue(NAME, NODE, names=f"IP:{self.namespaces.node}")
        # Names of the cluster are the only ones here, so no other server is asked.
        resolver = self.folder / "resolv.conf"
        resolver.write_text("")
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.containerd.socket}",
            # Still the rule in sandboxes, and Kubernetes 1.35 runs on it when asked to.
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failSwapOn": False,
            "authentication": {
                "x509": {"clientCAFile": str(self.core.ca)},
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "clusterDNS": [DNS],
            "clusterDomain": DOMAIN,
            "resolvConf": str(resolver),
            "healthzPort": free_ports(1)[0],
            # Tests should run on a nearly full disk too.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": str(self.folder / "logs"),
        }
