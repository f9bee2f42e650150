"""The chart on a real API server: Helm installs it, admission lets its pod pass, and its account can do the work."""

import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.controlplane import operator_process
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.helm.conftest import CHART
from tests.patience import PATIENCE
from tests.testbed.certificates import write_kubeconfig
from tests.testbed.control_plane import ControlPlane


@dataclass(frozen=True)
class Release:
    plane: ControlPlane
    namespace: str
    name: str = "chart"

    @property
    def operator(self) -> str:
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


@pytest.fixture(scope="module")
def release(control_plane: ControlPlane) -> Iterator[Release]:
    """Installed into a namespace that enforces the restricted standard. The definition is there already."""
    installed = Release(control_plane, f"chart-{secrets.token_hex(4)}")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    control_plane.api.post("/api/v1/namespaces", {"metadata": {"name": installed.namespace, "labels": labels}})
    installed.helm("install", installed.name, str(CHART), "--set", "crds.enabled=false,replicas=2")
    yield installed
    installed.helm("uninstall", installed.name)
    control_plane.api.request("DELETE", f"/api/v1/namespaces/{installed.namespace}")


@pytest.fixture(scope="module")
def operator(release: Release) -> Iterator[OperatorProcess]:
    """An operator with the token of the chart's account: what the chart does not grant, it has not."""
    plane = release.plane
    account = f"/api/v1/namespaces/{release.namespace}/serviceaccounts/{release.operator}"
    token_request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    token = plane.api.post(f"{account}/token", token_request)["status"]["token"]
    cluster = {"server": plane.server, "certificate-authority": str(plane.ca)}
    kubeconfig = write_kubeconfig(plane.folder / "chart.kubeconfig", cluster, {"token": token})
    with operator_process.running(
        plane,
        kubeconfig,
        f"--lease-namespace={release.namespace}",
        f"--lease-name={release.operator}",
        name="chart-operator",
    ) as running:
        yield running


def test_its_pods_are_admitted_where_the_restricted_standard_is_enforced(release: Release):
    until = time.monotonic() + PATIENCE
    pods = f"/api/v1/namespaces/{release.namespace}/pods"
    while len(release.plane.api.get(pods)["items"]) < 2:
        assert time.monotonic() < until, release.plane.kubectl("-n", release.namespace, "get", "events")
        time.sleep(0.2)
    warnings = release.plane.kubectl("-n", release.namespace, "get", "events", "--field-selector=type=Warning")
    assert "PodSecurity" not in warnings


def test_helm_says_what_to_do_next(release: Release):
    assert "kubectl apply -f examples/tiny-grpo.yaml" in release.helm("get", "notes", release.name)


def test_an_upgrade_with_the_same_values_changes_nothing(release: Release):
    before = release.helm("get", "manifest", release.name)
    release.helm("upgrade", release.name, str(CHART), "--reuse-values")
    assert release.helm("get", "manifest", release.name) == before


def test_the_account_of_the_chart_can_do_all_that_a_training_needs(
    release: Release, operator: OperatorProcess, namespace: str
):
    before = operator.refused_requests()
    live_training = LiveTraining(release.plane, namespace).apply()
    live_training.until_condition("Accepted", "True", "Accepted")
    live_training.until_job()
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    assert operator.readiness() == (200, "ok")
    assert operator.refused_requests() == before
