"""A Kubernetes control plane with KubeRay on nodes of kwok, on loopback, from nothing.

    etcd ─► API server ─┬─► controller manager, scheduler, kwok ───────────┐
                        ├─► our definition, nodes ─────────────────────────┼─► ready
                        └─► KubeRay's definitions and role ─► its operator ┘

Everything below the API server starts side by side. Whatever was started ends with this process, see supervisor.py.
"""

import secrets
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import api_server, kuberay, kwok, pods
from tests.testbed.api import Api
from tests.testbed.api_server import ApiServer
from tests.testbed.binaries import Binaries
from tests.testbed.certificates import Authority, write_kubeconfig
from tests.testbed.kuberay import KubeRay
from tests.testbed.pods import PodNetwork
from tests.testbed.processes import Processes, answers, free_ports

OUR_DEFINITION = Path(__file__).parents[2] / "crds" / "rl.qwen35.io_qwen35trainings.yaml"
ADMINISTRATORS = "system:masters"


@dataclass(frozen=True)
class ControlPlane:
    """What tests get: ways to talk to the cluster as anybody, and to take parts of it away."""

    folder: Path
    binaries: Binaries
    processes: Processes
    authority: Authority
    api_server: ApiServer
    kuberay: KubeRay
    pods: PodNetwork
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
        return _kubeconfig(self.folder, self.authority, self.server, user, groups)

    def kubeconfig_via(self, url: str) -> Path:
        """An administrator's kubeconfig for a proxy in front of the API server, whose certificate is not checked.

        Go clients send no credentials over plain http: there the proxy has to add `token` itself.
        """
        path = self.folder / f"via-{secrets.token_hex(4)}.kubeconfig"
        cluster = {"server": url} | ({"insecure-skip-tls-verify": True} if url.startswith("https:") else {})
        return write_kubeconfig(path, cluster, {"token": self.token})

    def stop_api_server(self) -> None:
        self.api_server.stop()

    def start_api_server(self) -> None:
        """On the same port, with the same data; returns once it is ready."""
        self.api_server.start()

    def restart_api_server(self) -> None:
        self.stop_api_server()
        self.start_api_server()

    def stop_kuberay(self) -> None:
        self.kuberay.stop()

    def start_kuberay(self) -> None:
        """Returns once it is ready."""
        self.kuberay.start()


@contextmanager
def control_plane(binaries: Binaries, folder: Path) -> Iterator[ControlPlane]:
    """Starts all in an empty folder, which also gets the logs. Raises NotReady, naming who and showing its log."""
    processes = Processes(folder)
    try:
        yield _start(binaries, folder, processes)
    finally:
        processes.stop_all()


def _start(binaries: Binaries, folder: Path, processes: Processes) -> ControlPlane:
    network = pods.start(processes, folder)
    authority = Authority.create(folder / "keys")
    token = secrets.token_hex(16)
    (authority.folder / "tokens.csv").write_text(f'{token},token,token,"{ADMINISTRATORS}"\n')
    server = ApiServer.create(folder, binaries, processes, authority)
    plane = ControlPlane(
        folder=folder,
        binaries=binaries,
        processes=processes,
        authority=authority,
        api_server=server,
        kuberay=KubeRay(binaries, processes, _kubeconfig(folder, authority, server.url, kuberay.NAME)),
        pods=network,
        api=Api.of(server.url, authority.ca, authority.issue("api", "admin", [ADMINISTRATORS])),
        token=token,
    )
    _kubeconfig(folder, authority, server.url, "admin", [ADMINISTRATORS])
    plane.start_api_server()
    _start_on(plane)
    return plane


def _start_on(plane: ControlPlane) -> None:
    """All that needs the API server."""

    def definitions_then_kuberay() -> None:
        # Each is about a megabyte, and the API server works on all at once.
        list(workers.map(plane.api.define, plane.binaries.kuberay_definitions))
        kuberay.grant(plane.api, plane.binaries)
        _wait_until_defined(plane, *plane.binaries.kuberay_definitions)
        plane.start_kuberay()

    with ThreadPoolExecutor(16) as workers:
        steps = [
            workers.submit(step)
            for step in (
                definitions_then_kuberay,
                lambda: _start_controllers(plane),
                lambda: _start_scheduler(plane),
                lambda: _start_nodes(plane),
                lambda: plane.api.define(OUR_DEFINITION),
            )
        ]
        for step in steps:
            step.result()
    _wait_until_defined(plane, OUR_DEFINITION)


def _wait_until_defined(plane: ControlPlane, *files: Path) -> None:
    plane.processes.wait(api_server.NAME, lambda: all(plane.api.defined(file) for file in files))


def _start_controllers(plane: ControlPlane) -> None:
    name, keys = "kube-controller-manager", plane.authority.folder
    # No certificate requests are signed here, and kwok's nodes get no address ranges: kwok gives pods their addresses.
    _start_component(
        plane,
        name,
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={keys / 'service-accounts.key'}",
        f"--root-ca-file={plane.ca}",
        "--allocate-node-cidrs=false",
        # A quota of a kind that it has not seen yet is counted at the next round, which is 5 minutes apart by default.
        "--resource-quota-sync-period=5s",
    )
    # A namespace without it takes no pods, and it comes well after the controllers say that they are healthy.
    plane.processes.wait(name, lambda: plane.api.exists("/api/v1/namespaces/default/serviceaccounts/default"))


def _start_scheduler(plane: ControlPlane) -> None:
    _start_component(plane, "kube-scheduler")


def _start_component(plane: ControlPlane, name: str, *flags: str) -> None:
    own = _kubeconfig(plane.folder, plane.authority, plane.server, f"system:{name}")
    (port,) = free_ports(1)
    command = [
        plane.binaries[name],
        *(f"--{use}kubeconfig={own}" for use in ("", "authentication-", "authorization-")),
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--leader-elect=false",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        *flags,
    ]
    plane.processes.start(name, command)
    plane.processes.wait(name, answers(f"https://127.0.0.1:{port}/healthz"))


def _start_nodes(plane: ControlPlane) -> None:
    own = _kubeconfig(plane.folder, plane.authority, plane.server, kwok.NAME, [ADMINISTRATORS])
    kwok.start(plane.binaries, plane.processes, own, plane.pods.network)
    kwok.add_nodes(plane.api)
    plane.processes.wait(kwok.NAME, lambda: kwok.nodes_ready(plane.api))


def _kubeconfig(folder: Path, authority: Authority, server: str, user: str, groups: Sequence[str] = ()) -> Path:
    # A test may ask for the same user in other groups; the first of a name has the plain file name.
    name = "".join(letter if letter.isalnum() else "-" for letter in user)
    if (folder / f"{name}.kubeconfig").exists():
        name += f"-{secrets.token_hex(4)}"
    issued = authority.issue(name, user, groups)
    return write_kubeconfig(
        folder / f"{name}.kubeconfig",
        {"server": server, "certificate-authority": str(authority.ca)},
        {"client-certificate": str(issued.certificate), "client-key": str(issued.key)},
    )
