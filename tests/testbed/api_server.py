"""etcd and the API server."""

from dataclasses import dataclass
from pathlib import Path

from tests.testbed.binaries import Binaries
from tests.testbed.certificates import Authority
from tests.testbed.processes import Processes, answers, free_ports

ETCD = "etcd"
NAME = "kube-apiserver"


@dataclass(frozen=True)
class ApiServer:
    """Where both listen, with what they keep: enough to start them again as they were."""

    folder: Path
    binaries: Binaries
    processes: Processes
    authority: Authority
    port: int
    etcd: str

    @classmethod
    def create(cls, folder: Path, binaries: Binaries, processes: Processes, authority: Authority) -> "ApiServer":
        """Starts etcd, which the API server of this port will use."""
        port, client, peer = free_ports(3)
        server = cls(folder, binaries, processes, authority, port, f"http://127.0.0.1:{client}")
        server._start_etcd(f"http://127.0.0.1:{peer}")
        authority.issue(NAME, "kube-apiserver", names="IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc")
        authority.key_pair("service-accounts")
        return server

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

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
        command = [
            self.binaries[NAME],
            f"--etcd-servers={self.etcd}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            # No pod of this bed can use the Service `kubernetes`, and a loopback address is no valid endpoint.
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=Node,RBAC",
            f"--client-ca-file={self.authority.ca}",
            f"--token-auth-file={keys / 'tokens.csv'}",
            f"--tls-cert-file={keys / NAME}.crt",
            f"--tls-private-key-file={keys / NAME}.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={keys / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={keys / 'service-accounts.key'}",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--profiling=false",
        ]
        self.processes.start(NAME, command)
        self.processes.wait(NAME, answers(f"{self.url}/readyz"))

    def stop(self) -> None:
        self.processes.stop(NAME)
