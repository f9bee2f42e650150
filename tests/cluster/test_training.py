"""The tiny model learns in pods: the chart's operator, KubeRay, a real Ray cluster, the trainer's image."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.node import REPOSITORY

pytestmark = pytest.mark.timeout(1800)
EXAMPLE = REPOSITORY / "examples" / "tiny-grpo.yaml"


def test_the_tiny_example_learns_in_pods(
    cluster: Cluster, namespace: str, eventually: Callable[..., None], tmp_path: Path
):
    cluster.kubectl("--namespace", namespace, "apply", f"--filename={EXAMPLE}")
    eventually(lambda: running(cluster, namespace) == ["head", "rollout", "train"], "every pool's pod runs")
    assert "Succeeded" in qwen35(cluster, "status", "tiny-grpo", "--namespace", namespace, "--watch")
    ended = status(cluster, namespace)
    assert ended["state"] == "Succeeded", ended
    assert len(ended["attempts"]) == 1
    assert ended["progress"]["accuracy"] >= 0.9
    page = tmp_path / "report.html"
    qwen35(cluster, "report", "tiny-grpo", "--namespace", namespace, "--output", str(page))
    assert "Succeeded" in page.read_text()


def status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    path = f"/apis/rl.qwen35.io/v1alpha1/namespaces/{namespace}/qwen35trainings/tiny-grpo"
    return dict(cluster.api.get(path).get("status", {}))


def running(cluster: Cluster, namespace: str) -> list[str]:
    """Pools whose pod runs."""
    pods = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return sorted(pod["metadata"]["labels"]["rl.qwen35.io/pool"] for pod in pods if pod["status"]["phase"] == "Running")


def qwen35(cluster: Cluster, *arguments: str) -> str:
    """What the command prints to one who looks after the training. Raises CalledProcessError."""
    command = [sys.executable, "-m", "qwen35_trainer.cli", *arguments]
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=900).stdout
