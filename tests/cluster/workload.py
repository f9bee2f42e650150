"""Pods that tests run, in the operator's image: there is Python in it."""

from typing import Any

from images.definition import definition
from tests.testbed.core import Core


def pod(name: str, script: str, *arguments: str, **container: Any) -> dict[str, Any]:
    """A pod that runs a Python script once."""
    inside = {
        "name": "main",
        "image": definition("operator").tagged,
        "command": ["python", "-uc", script, *arguments],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [inside | container],
        },
    }


def create(core: Core, namespace: str, manifest: dict[str, Any]) -> None:
    core.api.post(f"/api/v1/namespaces/{namespace}/pods", manifest)


def phase(core: Core, namespace: str, name: str) -> str:
    return str(core.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]["phase"])


def output(core: Core, namespace: str, manifest: dict[str, Any]) -> str:
    """Creates the pod and returns what it printed. Raises RuntimeError, with what is known of it, when it failed."""
    create(core, namespace, manifest)
    name = manifest["metadata"]["name"]
    core.processes.wait("kubelet", lambda: phase(core, namespace, name) in ("Succeeded", "Failed"))
    where = ("--namespace", namespace)
    logs = core.kubectl(*where, "logs", name)
    if phase(core, namespace, name) == "Failed":
        raise RuntimeError(f"pod {name} failed:\n{logs}\n{core.kubectl(*where, 'describe', 'pod', name)}")
    return logs
