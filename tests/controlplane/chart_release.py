"""A release of the chart on the real control plane."""

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helm.conftest import CHART
from tests.patience import PATIENCE
from tests.testbed.api import Api
from tests.testbed.certificates import write_kubeconfig
from tests.testbed.control_plane import ControlPlane


@dataclass(frozen=True)
class Release:
    plane: ControlPlane
    namespace: str
    name: str = "chart"

    @property
    def operator(self) -> str:
        """Name of the operator's objects, its ServiceAccount included."""
        return f"{self.name}-qwen35-operator"

    def helm(self, *arguments: str) -> str:
        command = [
            self.plane.binaries["helm"],
            *arguments,
            f"--kubeconfig={self.plane.kubeconfig}",
            "-n",
            self.namespace,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kubeconfig_of(self, account: str) -> Path:
        """A kubeconfig of a ServiceAccount of the release's namespace."""
        cluster = {"server": self.plane.server, "certificate-authority": str(self.plane.ca)}
        file = self.plane.folder / f"{self.namespace}-{account}.kubeconfig"
        return write_kubeconfig(file, cluster, {"token": self.token(account)})

    def token(self, account: str) -> str:
        """A token of a ServiceAccount in the release's namespace."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token"
        spec = {"expirationSeconds": 3600}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self.plane.api.post(path, request)["status"]["token"])

    def api_of(self, account: str) -> Api:
        """The API server as a ServiceAccount of the release's namespace sees it."""
        return Api.of_token(self.plane.server, self.plane.ca, self.token(account))


@contextmanager
def installed(plane: ControlPlane, *values: str, chart: Path = CHART, defines: bool = False) -> Iterator[Release]:
    """Installed into a namespace that enforces the restricted standard.

    defines: whether the chart's definition replaces the one that is there already, and stays.
    """
    definition = ["--take-ownership"] if defines else ["--set", "crds.enabled=false"]
    release = Release(plane, f"chart-{secrets.token_hex(4)}")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": release.namespace, "labels": labels}})
    release.helm("install", release.name, str(chart), *definition, *(f"--set={value}" for value in values))
    yield release
    release.helm("uninstall", release.name)
    plane.api.request("DELETE", f"/api/v1/namespaces/{release.namespace}")
