"""Pods that tests run, in the operator's image: there is Python in it."""

from typing import Any

from images.definition import definition
from tests.patience import PATIENCE
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
    """Creates the pod and returns what it printed. Raises RuntimeError when it does not succeed."""
    create(core, namespace, manifest)
    name = manifest["metadata"]["name"]
    where = ("--namespace", namespace)
    try:
        core.kubectl(
            *where, "wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", f"--timeout={PATIENCE:.0f}s"
        )
    except RuntimeError as problem:
        raise RuntimeError(f"{problem}\n{core.kubectl(*where, 'describe', 'pod', name)}") from problem
    return core.kubectl(*where, "logs", name)
