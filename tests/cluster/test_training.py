"""The tiny examples in pods, as their users apply them: the chart's operator, KubeRay, a real Ray cluster, the trainer's image."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import EvaluationRecord
from tests.cluster.cluster import Cluster
from tests.cluster.node import REPOSITORY
from tests.cluster.training import PodTraining
from tests.cluster.volume import claim
from tests.runtime.test_pod_certificate import authority, store

pytestmark = pytest.mark.timeout(1800)
EXAMPLES = REPOSITORY / "examples"
UPDATES = 10
"""Of supervised training: enough to see the held-out loss fall."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("changes", "pools"),
    [
        ({}, ["head", "rollout", "train"]),
        ({"mode": "Colocated", "async": {"batchesPerPublication": 1}}, ["head", "train"]),
    ],
    ids=["fully asynchronous", "colocated"],
)
def test_the_tiny_example_learns_in_pods(
    cluster: Cluster, namespace: str, eventually: Callable[..., None], changes: dict[str, Any], pools: list[str]
):
    manifest = yaml.safe_load((EXAMPLES / "tiny-grpo.yaml").read_text())
    manifest["spec"] |= changes
    cluster.kubectl("--namespace", namespace, "apply", "--filename=-", input=json.dumps(manifest))
    eventually(lambda: running(cluster, namespace) == pools, "every pool's pod runs")
    ended = until_ended(cluster, namespace, "tiny-grpo")
    assert ended["state"] == "Succeeded", ended
    assert len(ended["attempts"]) == 1
    assert ended["progress"]["accuracy"] >= 0.9


def test_supervised_examples_train_in_pods_without_a_rollout_pool(
    cluster: Cluster, namespace: str, eventually: Callable[..., None], tmp_path: Path
):
    folder = claim(cluster, namespace)
    manifest = yaml.safe_load((EXAMPLES / "tiny-sft.yaml").read_text())
    spec = manifest["spec"]
    spec["train"]["updates"], spec["evaluation"]["everyUpdates"] = UPDATES, UPDATES // 2
    spec["checkpoint"] = {"everyUpdates": UPDATES, "storage": {"persistentVolumeClaim": {"claimName": folder.name}}}
    cluster.kubectl("--namespace", namespace, "apply", "--filename=-", input=json.dumps(manifest))
    eventually(lambda: running(cluster, namespace) == ["head", "train"], "every pool's pod runs")
    ended = until_ended(cluster, namespace, "tiny-sft")
    assert ended["state"] == "Succeeded", ended
    assert len(ended["attempts"]) == 1
    assert (ended["progress"]["update"], ended["lastCheckpoint"]["update"]) == (UPDATES, UPDATES)
    assert "RolloutReady" not in {condition["type"] for condition in ended["conditions"]}
    records = list(read_records(folder / "runs" / "tiny-sft" / "metrics.jsonl"))
    losses = [record.loss for record in records if isinstance(record, EvaluationRecord)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True), "the loss of held-out examples falls"
    page = tmp_path / "report.html"
    qwen35(cluster, "report", "tiny-sft", "--namespace", namespace, "--output", str(page))
    assert "Succeeded" in page.read_text()


@pytest.mark.soak
def test_with_tls_a_training_learns_in_pods_and_its_calls_do_not_need_ray(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Its pods accept each other by the certificates that they make, also for the connections to the replicas."""
    files = store(tmp_path / "authority", authority())
    cluster.kubectl("--namespace", namespace, "create", "secret", "tls", "ray-ca", *from_files(files))
    training = PodTraining.begin(cluster, namespace, "secured", updates=5, pods={"tls": {"secretName": "ray-ca"}})
    training.until_pods("head", 1)
    training.until_state("Succeeded")
    assert [attempt["outcome"] for attempt in training.attempts] == ["Succeeded"]
    training.assert_each_prompt_trained_once(5)
    logs = {log.name: log.read_text() for log in training.run.rglob("*.log")}
    assert {"driver.log", "rollout-0.log"} <= logs.keys()
    assert [name for name, text in logs.items() if "calls travel through Ray" in text] == []


def from_files(folder: Path) -> list[str]:
    """Arguments with which `kubectl create secret tls` reads the files of an authority."""
    return [f"--cert={folder / 'tls.crt'}", f"--key={folder / 'tls.key'}"]


def test_deleted_while_its_pods_start_it_leaves_nothing(cluster: Cluster, namespace: str) -> None:
    training = PodTraining.begin(cluster, namespace, "short-lived", updates=5)
    training.until(lambda: training.pods("train"), "a train pod")
    training.delete_and_see_that_nothing_is_left()


def until_ended(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    """Return the status after the command that follows the training has ended."""
    output = qwen35(cluster, "status", name, "--namespace", namespace, "--watch")
    assert "Succeeded" in output, output
    path = f"/apis/rl.qwen35.io/v1alpha1/namespaces/{namespace}/qwen35trainings/{name}"
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
