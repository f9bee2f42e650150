"""Our chart in the cluster, by Helm, in a namespace that enforces the restricted standard."""

import subprocess
from dataclasses import dataclass

from tests.cluster.node import REPOSITORY
from tests.patience import PATIENCE
from tests.testbed.api import is_true
from tests.testbed.core import Core

CHART = REPOSITORY / "helm" / "qwen35-operator"
ENFORCE = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True)
class Release:
    core: Core
    name: str = "qwen35"
    namespace: str = "qwen35-system"

    @property
    def operator(self) -> str:
        return f"{self.name}-qwen35-operator"

    def install(self) -> None:
        """Returns once the operator is ready."""
        namespace = {"metadata": {"name": self.namespace, "labels": {ENFORCE: "restricted"}}}
        self.core.api.post("/api/v1/namespaces", namespace)
        self.helm("install", self.name, str(CHART), "--wait", f"--timeout={PATIENCE:.0f}s")

    def kill_operator(self) -> None:
        """Without grace; returns once the next one is ready."""
        before = self._ready()
        pods = ("--namespace", self.namespace, "pod", "--selector=app.kubernetes.io/component=operator")
        self.core.kubectl("delete", *pods, "--grace-period=0", "--force")
        self.core.processes.wait("kubelet", lambda: bool(self._ready() - before))

    def _ready(self) -> set[str]:
        """Names of the operator's pods that are ready."""
        query = "labelSelector=app.kubernetes.io/component=operator"
        pods = self.core.api.get(f"/api/v1/namespaces/{self.namespace}/pods?{query}")["items"]
        return {pod["metadata"]["name"] for pod in pods if is_true(pod["status"], "Ready")}

    def helm(self, *arguments: str) -> str:
        """What Helm prints. Raises RuntimeError with what it complains about."""
        options = [f"--kubeconfig={self.core.kubeconfig}", f"--namespace={self.namespace}"]
        command = [self.core.binaries["helm"], *arguments, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout
