"""`qwen35 operator` as a separate process next to a control plane, with the rights that the chart grants and no more."""

import os
import secrets
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml

from qwen35_operator.kube.kinds import LEASE
from tests.controlplane.live_training import Plane
from tests.patience import PATIENCE
from tests.testbed.control_plane import ControlPlane
from tests.testbed.processes import answers, free_ports

USER = "qwen35-operator"
RBAC = "rbac.authorization.k8s.io"
RULES = Path(__file__).parents[2] / "helm" / "qwen35-operator" / "files" / "rules.yaml"
CLUSTER_RULES = RULES.with_name("cluster-rules.yaml")
LEASE_RULES = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}]
LEASE_NAMESPACE = "default"


@dataclass(frozen=True)
class OperatorProcess:
    """One replica. It survives whatever a test does to the cluster: `pid` stays."""

    plane: ControlPlane
    name: str
    command: tuple[str, ...]
    metrics_port: int
    health_port: int
    metrics_token: str | None = None
    """Token with which to read the metrics; None if they are open."""

    def start(self) -> None:
        """Returns once its probe answers."""
        self.plane.processes.start(self.name, self.command, grace=15)
        self.plane.processes.wait(self.name, answers(f"http://127.0.0.1:{self.health_port}/healthz"))

    def stop(self) -> None:
        """By SIGTERM, as Kubernetes does."""
        self.plane.processes.stop(self.name)

    def kill(self) -> None:
        """As a crash of the node does."""
        os.kill(self.pid, signal.SIGKILL)
        self.plane.processes.running[self.name].wait()
        self.plane.processes.stop(self.name)

    @property
    def pid(self) -> int:
        supervisor = psutil.Process(self.plane.processes.running[self.name].pid)
        (own,) = supervisor.children()
        return own.pid

    @property
    def log(self) -> str:
        return self.plane.processes.log(self.name).read_text()

    def readiness(self) -> tuple[int, str]:
        """What the kubelet is answered: status and text."""
        return _answer(urllib.request.Request(f"http://127.0.0.1:{self.health_port}/readyz"))

    def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels, as Prometheus reads them."""
        status, text = self.scrape(self.metrics_token)
        assert status == 200, text
        lines = text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def scrape(self, token: str | None) -> tuple[int, str]:
        """What Prometheus is answered, with this bearer token or without one: status and text."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.metrics_port}/metrics", headers=headers)
        return _answer(request)

    def refused_requests(self) -> dict[str, float]:
        """Requests that the API server did not permit, by verb and resource. Refusals by a quota have the same code."""
        return refused(self.metrics())

    def rests(self) -> bool:
        """Whether it leads, has looked at something and has nothing to do."""
        try:
            metrics = self.metrics()
        except OSError:
            return False  # it starts, or has just been killed
        return metrics["qwen35_leading"] == 1 and metrics["qwen35_queue_length"] == 0 and _looks(metrics) > 0

    def looks(self) -> int:
        """How often it has looked at something."""
        return _looks(self.metrics())


def _answer(request: urllib.request.Request) -> tuple[int, str]:
    """Status and text of an answer. Raises OSError when nobody answers."""
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refused(metrics: Mapping[str, float]) -> dict[str, float]:
    """The samples that count requests which the API server did not permit."""
    return {
        name: count
        for name, count in metrics.items()
        if name.startswith("qwen35_api_requests") and 'code="403"' in name
    }


def _looks(metrics: Mapping[str, float]) -> int:
    return int(sum(count for name, count in metrics.items() if name.startswith("qwen35_reconciles_total")))


def process(
    plane: ControlPlane,
    kubeconfig: Path,
    *options: str,
    name: str = USER,
    lease: str = USER,
    packages: Path | None = None,
) -> OperatorProcess:
    """An operator that has not been started yet. packages: folder with the Python packages of another release."""
    released(plane, LEASE_NAMESPACE, lease)
    metrics, health = free_ports(2)
    command = (
        *(() if packages is None else ("env", f"PYTHONPATH={packages}")),
        str(Path(sys.executable).with_name("qwen35")),
        "operator",
        f"--kubeconfig={kubeconfig}",
        f"--lease-namespace={LEASE_NAMESPACE}",
        f"--lease-name={lease}",
        f"--metrics-port={metrics}",
        f"--health-port={health}",
        *options,
    )
    return OperatorProcess(plane, name, command, metrics, health)


def released(plane: Plane, namespace: str, name: str) -> None:
    """Make the Lease, if there is none, as one whose holder has ended well: who finds none waits a term before it acts."""
    spec = {"holderIdentity": "", "renewTime": "2026-01-01T00:00:00.000000Z"}
    if not plane.api.exists(LEASE.path(namespace, name)):
        plane.api.post(LEASE.path(namespace), {"metadata": {"name": name}, "spec": spec})


@contextmanager
def running(
    plane: ControlPlane, kubeconfig: Path, *options: str, name: str = USER, packages: Path | None = None
) -> Iterator[OperatorProcess]:
    """An operator that is ended by SIGTERM. packages: as for `process`."""
    operator = process(plane, kubeconfig, *options, name=name, packages=packages)
    try:
        operator.start()
        yield operator
    finally:
        operator.stop()


def rules(*, without: str | None = None, cluster: bool = True) -> list[dict[str, Any]]:
    """The rules of the operator's ClusterRole, but for one resource. cluster: otherwise those of its Role in a namespace."""
    files = [RULES, CLUSTER_RULES] if cluster else [RULES]
    return [deepcopy(rule) for file in files for rule in _written_rules(file) if without not in rule["resources"]]


@cache
def _written_rules(file: Path) -> Sequence[dict[str, Any]]:
    """The rules in a file of the chart, which every operator in memory needs."""
    return tuple(yaml.safe_load(file.read_text()))


def user(plane: ControlPlane, granted: Sequence[dict[str, Any]], namespaces: Sequence[str] = ()) -> Path:
    """A kubeconfig of a fresh user with these rules, everywhere or in the namespaces, and the Lease's Role."""
    name = f"operator-{secrets.token_hex(4)}"
    for namespace in namespaces or (None,):
        grant(plane, name, granted, namespace)
    grant(plane, f"{name}-lease", LEASE_RULES, LEASE_NAMESPACE, user=name)
    return plane.kubeconfig_for(name)


def grant(
    plane: ControlPlane, name: str, granted: Sequence[dict[str, Any]], namespace: str | None, *, user: str | None = None
) -> None:
    """A role of this name and its binding, overwritten if they exist."""
    kind = "ClusterRole" if namespace is None else "Role"
    where = {} if namespace is None else {"namespace": namespace}
    header = {"apiVersion": f"{RBAC}/v1", "metadata": {"name": name, **where}}
    subject = {"apiGroup": RBAC, "kind": "User", "name": user or name}
    binding = {"roleRef": {"apiGroup": RBAC, "kind": kind, "name": name}, "subjects": [subject]}
    plane.kubectl(
        "apply",
        "--filename=-",
        input=yaml.safe_dump_all(
            [header | {"kind": kind, "rules": list(granted)}, header | {"kind": f"{kind}Binding"} | binding]
        ),
    )
