"""Addresses and names of Services: kube-proxy and CoreDNS, as processes of the node."""

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kubelet import DNS, DOMAIN, NODE
from tests.cluster.namespaces import Namespaces
from tests.testbed.certificates import ADMINISTRATORS
from tests.testbed.core import Core
from tests.testbed.processes import answers, free_ports

PROXY = "kube-proxy"
NAMES = "coredns"
PORTS = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
COREFILE = """\
.:53 {{
    bind {address}
    errors
    ready {address}:{ready}
    kubernetes {domain} in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 5
    }}
    cache 5
}}
"""


@dataclass(frozen=True)
class Services:
    folder: Path
    core: Core
    namespaces: Namespaces

    def start_proxy(self) -> None:
        """Returns once its rules are there."""
        own = self.core.kubeconfig_for("system:kube-proxy")
        health, metrics = free_ports(2)
        command = [
            self.core.binaries[PROXY],
            f"--kubeconfig={own}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={self.namespaces.pods}",
            f"--hostname-override={NODE}",
            f"--healthz-bind-address={self.namespaces.node}:{health}",
            f"--metrics-bind-address={self.namespaces.node}:{metrics}",
            # The node must not change the limit of the machine.
            "--conntrack-max-per-core=0",
        ]
        self.core.processes.start(PROXY, self.namespaces.command(*command))
        self.core.processes.wait(PROXY, answers(f"http://{self.namespaces.node}:{health}/healthz"))

    def start_names(self) -> None:
        """Return once the DNS server answers, at the address that all pods use."""
        own = self.core.kubeconfig_for(NAMES, [ADMINISTRATORS])
        (ready,) = free_ports(1)
        file = self.folder / "Corefile"
        file.write_text(
            COREFILE.format(address=self.namespaces.node, ready=ready, domain=DOMAIN, kubeconfig=own),
        )
        command = [self.core.binaries[NAMES], f"-conf={file}"]
        self.core.processes.start(NAMES, self.namespaces.command(*command))
        self._serve_names()
        self.core.processes.wait(NAMES, answers(f"http://{self.namespaces.node}:{ready}/ready"))

    def _serve_names(self) -> None:
        service = {"metadata": {"name": "kube-dns"}, "spec": {"clusterIP": DNS, "ports": PORTS}}
        labels = {"kubernetes.io/service-name": "kube-dns"}
        endpoints = {
            "metadata": {"name": "kube-dns", "labels": labels},
            "addressType": "IPv4",
            "ports": PORTS,
            "endpoints": [{"addresses": [self.namespaces.node], "conditions": {"ready": True}}],
        }
        self.core.api.post("/api/v1/namespaces/kube-system/services", service)
        self.core.api.post("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices", endpoints)
