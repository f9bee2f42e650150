"""etcd and the API server."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.binaries import Binaries
from tests.testbed.certificates import ADMINISTRATORS, Authority
from tests.testbed.processes import Processes, answers, free_ports

SERVICES = ipaddress.IPv4Network("10.96.0.0/12")
"""Addresses of Services; the first is that of the API server."""
ETCD = "etcd"
NAME = "kube-apiserver"
KUBELET_CLIENT = "kubelet-client"
COLLECTION = {"GOGC": "200"}
"""Go collects garbage half as often as by default, for which the API server takes a fifth of its time: a bed lives for minutes."""
_MINOR = os.environ.get("QWEN35_TESTBED_KUBERNETES")
EMULATION = [f"--emulated-version={_MINOR}"] if _MINOR else []
"""The flag of the control plane's components that sets the Kubernetes version they emulate, like 1.32; none for their own.

A newer scheduler would wait for kinds that the older API server does not serve, and place no pod. `make soak` sets it.
"""


@dataclass(frozen=True)
class ApiServer:
    """Where both listen, with what they keep: enough to start them again as they were."""

    folder: Path
    binaries: Binaries
    processes: Processes
    authority: Authority
    address: str
    port: int
    etcd: str

    @classmethod
    def create(
        cls, folder: Path, binaries: Binaries, processes: Processes, authority: Authority, address: str
    ) -> "ApiServer":
        """Starts etcd, which the API server of this address will use."""
        port, client, peer = free_ports(3)
        server = cls(folder, binaries, processes, authority, address, port, f"http://127.0.0.1:{client}")
        server._start_etcd(f"http://127.0.0.1:{peer}")
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        addresses = dict.fromkeys(["127.0.0.1", address, str(SERVICES[1])])
        all_names = [*(f"IP:{ip}" for ip in addresses), *(f"DNS:{name}" for name in names)]
        authority.issue(NAME, "kube-apiserver", names=",".join(all_names))
        authority.issue(KUBELET_CLIENT, KUBELET_CLIENT, [ADMINISTRATORS])
        authority.key_pair("service-accounts")
        return server

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    def _start_etcd(self, peer: str) -> None:
        command = [
            self.binaries["etcd"],
            "--name=testbed",
            f"--data-dir={self.folder / 'etcd'}",
            # What a power cut leaves of the tests' objects matters to nobody.
            "--unsafe-no-fsync",
            f"--listen-client-urls={self.etcd}",
            f"--advertise-client-urls={self.etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=testbed={peer}",
            "--log-level=warn",
        ]
        self.processes.start(ETCD, command)
        self.processes.wait(ETCD, answers(f"{self.etcd}/health"))

    def start(self) -> None:
        """Returns once it is ready."""
        keys = self.authority.folder
        # A loopback address is not a valid endpoint, and no pod could use it.
        loopback = ipaddress.ip_address(self.address).is_loopback
        command = [
            self.binaries[NAME],
            f"--etcd-servers={self.etcd}",
            f"--secure-port={self.port}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--endpoint-reconciler-type={'none' if loopback else 'lease'}",
            f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC",
            f"--client-ca-file={self.authority.ca}",
            f"--token-auth-file={keys / 'tokens.csv'}",
            f"--tls-cert-file={keys / NAME}.crt",
            f"--tls-private-key-file={keys / NAME}.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={keys / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={keys / 'service-accounts.key'}",
            f"--kubelet-client-certificate={keys / KUBELET_CLIENT}.crt",
            f"--kubelet-client-key={keys / KUBELET_CLIENT}.key",
            f"--kubelet-certificate-authority={self.authority.ca}",
            "--kubelet-preferred-address-types=InternalIP",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--profiling=false",
            *EMULATION,
        ]
        self.processes.start(NAME, command, environment=COLLECTION)
        self.processes.wait(NAME, answers(f"{self.url}/readyz"))

    def stop(self) -> None:
        self.processes.stop(NAME)
