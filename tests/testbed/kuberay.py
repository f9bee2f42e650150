"""KubeRay's operator, outside the cluster, with the rights that its release grants it and no more."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.api import DEFINITIONS, Api
from tests.testbed.binaries import Binaries
from tests.testbed.processes import Processes, answers, free_ports

NAME = "kuberay-operator"
STUBS = {"rayservices": "RayService", "raycronjobs": "RayCronJob"}
"""Kinds that KubeRay watches and nobody here makes. Their definitions, about a megabyte each, are replaced by small ones."""
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def define(api: Api, file: Path) -> None:
    """Applies one of the released definitions, or in its place one that takes anything."""
    plural = file.stem.partition("_")[2]
    if plural not in STUBS:
        api.apply(f"{DEFINITIONS}/{plural}.ray.io", served(file.read_text()).encode())
        return
    kind = STUBS[plural]
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    stub = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.ray.io"},
        "spec": {
            "group": "ray.io",
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "versions": [version | {"subresources": {"status": {}}}],
        },
    }
    # JSON is YAML too.
    api.apply(f"{DEFINITIONS}/{plural}.ray.io", json.dumps(stub).encode())


def served(definition: str) -> str:
    """The definition without the version v1alpha1, which nobody here uses: for each, the API server takes seconds at every start."""
    head, *versions = re.split(r"^  (?=- )", definition, flags=re.MULTILINE)
    (used,) = (version for version in versions if "\n    name: v1\n" in version)
    return f"{head}  {used}"


def grant(api: Api, binaries: Binaries) -> None:
    """Gives the released ClusterRole to the user that the operator's certificate names."""
    api.apply(f"{RBAC}/clusterroles/{NAME}", binaries.kuberay_role.read_bytes())
    binding = {
        "metadata": {"name": NAME},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": NAME}],
    }
    api.post(f"{RBAC}/clusterrolebindings", binding)


@dataclass(frozen=True)
class KubeRay:
    """The operator's process. It ends when a kind it watches is not defined, so define them first."""

    binaries: Binaries
    processes: Processes
    kubeconfig: Path

    def start(self, *options: str) -> None:
        """Returns once it is ready. options: further flags, which take precedence over those here."""
        metrics, health = free_ports(2)
        command = [
            self.binaries[NAME],
            f"--metrics-addr=127.0.0.1:{metrics}",
            f"--health-probe-bind-address=127.0.0.1:{health}",
            "--enable-leader-election=false",
            # The host has no cluster DNS: the operator reaches dashboards through the API server.
            "--use-kubernetes-proxy=true",
            "--reconcile-concurrency=8",
            "--qps=200",
            "--burst=400",
            *options,
        ]
        self.processes.start(NAME, command, environment={"KUBECONFIG": str(self.kubeconfig)})
        self.processes.wait(NAME, answers(f"http://127.0.0.1:{health}/readyz"))

    def stop(self) -> None:
        self.processes.stop(NAME)
