"""A control plane without nodes: etcd, the API server, the controllers and the scheduler.

etcd ─► API server ─► controller manager, scheduler
"""

import secrets
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import api_server
from tests.testbed.api import Api
from tests.testbed.api_server import ApiServer
from tests.testbed.binaries import Binaries
from tests.testbed.certificates import ADMINISTRATORS, Authority, write_kubeconfig
from tests.testbed.processes import Processes, answers, free_ports

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Core:
    """What tests get of it: ways to talk to the cluster as anybody, and to take parts of it away."""

    folder: Path
    binaries: Binaries
    processes: Processes
    authority: Authority
    api_server: ApiServer
    api: Api
    """The API server as an administrator sees it."""
    token: str
    """An administrator's bearer token: unlike a client certificate it passes through a proxy that ends TLS."""

    @property
    def server(self) -> str:
        return self.api_server.url

    @property
    def ca(self) -> Path:
        return self.authority.ca

    @property
    def kubeconfig(self) -> Path:
        """An administrator's."""
        return self.folder / "admin.kubeconfig"

    def kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:  # noqa: A002
        """What kubectl prints. Raises RuntimeError with what it complains about."""
        # Its cache goes by host and port, and another bed may once have had this port.
        options = [f"--kubeconfig={kubeconfig or self.kubeconfig}", f"--cache-dir={self.folder / 'kubectl'}"]
        command = [self.binaries["kubectl"], *options, *arguments]
        done = subprocess.run(command, input=input, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig with a fresh client certificate of a user who may do what RBAC grants, and no more."""
        # A test may ask for the same user in other groups; the first of a name has the plain file name.
        name = "".join(letter if letter.isalnum() else "-" for letter in user)
        if (self.folder / f"{name}.kubeconfig").exists():
            name += f"-{secrets.token_hex(4)}"
        issued = self.authority.issue(name, user, groups)
        return write_kubeconfig(
            self.folder / f"{name}.kubeconfig",
            {"server": self.server, "certificate-authority": str(self.ca)},
            {"client-certificate": str(issued.certificate), "client-key": str(issued.key)},
        )

    def kubeconfig_via(self, url: str) -> Path:
        """An administrator's kubeconfig for a proxy in front of the API server, whose certificate is not checked.

        Go clients send no credentials over plain http: there the proxy has to add `token` itself.
        """
        path = self.folder / f"via-{secrets.token_hex(4)}.kubeconfig"
        cluster = {"server": url} | ({"insecure-skip-tls-verify": True} if url.startswith("https:") else {})
        return write_kubeconfig(path, cluster, {"token": self.token})

    # As in tests/virtual/plane.py, so that the same stories run on both.

    def now(self) -> float:
        """The time in seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of a clock that measures waits."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let this time pass."""
        time.sleep(seconds)

    def stop_api_server(self) -> None:
        self.api_server.stop()

    def start_api_server(self) -> None:
        """On the same port, with the same data; returns once it is ready."""
        self.api_server.start()

    def restart_api_server(self) -> None:
        self.stop_api_server()
        self.start_api_server()

    def wait_until_defined(self, *files: Path) -> None:
        """Until these custom resource definitions are served."""
        self.processes.wait(api_server.NAME, lambda: all(self.api.defined(file) for file in files))

    def start_controllers(self) -> None:
        """Returns once pods can be made."""
        name, keys = "kube-controller-manager", self.authority.folder
        # No certificate requests are signed here, and nodes get no address ranges: kwok and CNI have their own.
        self._start_component(
            name,
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={keys / 'service-accounts.key'}",
            f"--root-ca-file={self.ca}",
            "--allocate-node-cidrs=false",
            # A quota of a kind that it has not seen yet is counted at the next round, 5 minutes apart by default.
            "--resource-quota-sync-period=5s",
        )
        # A namespace without it takes no pods, and it comes well after the controllers say that they are healthy.
        self.processes.wait(name, lambda: self.api.exists("/api/v1/namespaces/default/serviceaccounts/default"))

    def start_scheduler(self) -> None:
        """Returns once it is ready."""
        self._start_component("kube-scheduler")

    def _start_component(self, name: str, *flags: str) -> None:
        own = self.kubeconfig_for(f"system:{name}")
        (port,) = free_ports(1)
        command = [
            self.binaries[name],
            *(f"--{use}kubeconfig={own}" for use in ("", "authentication-", "authorization-")),
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--leader-elect=false",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            *api_server.EMULATION,
            *flags,
        ]
        self.processes.start(name, command)
        self.processes.wait(name, answers(f"https://127.0.0.1:{port}/healthz"))


def start(binaries: Binaries, folder: Path, processes: Processes, address: str = LOOPBACK) -> Core:
    """Starts etcd and the API server, at an address that nodes reach: the loopback address where there are none."""
    authority = Authority.create(folder / "keys")
    token = secrets.token_hex(16)
    (authority.folder / "tokens.csv").write_text(f'{token},token,token,"{ADMINISTRATORS}"\n')
    server = ApiServer.create(folder, binaries, processes, authority, address)
    core = Core(
        folder=folder,
        binaries=binaries,
        processes=processes,
        authority=authority,
        api_server=server,
        api=Api.of(server.url, authority.ca, authority.issue("api", "admin", [ADMINISTRATORS])),
        token=token,
    )
    core.kubeconfig_for("admin", [ADMINISTRATORS])
    core.start_api_server()
    return core
