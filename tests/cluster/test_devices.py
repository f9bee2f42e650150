"""Trainings on accelerators that are none: real admission, and real scheduling by what their pods ask for."""

from typing import Any

import pytest

from images.definition import definition
from tests.cluster.cluster import Cluster
from tests.cluster.release import ENFORCE
from tests.controlplane.live_training import LiveTraining

pytestmark = pytest.mark.timeout(1800)
OFFERED = {"nvidia.com/gpu": 8, "huawei.com/Ascend910": 8}
PROFILES = {"NVIDIA": ("nvidia.com/gpu", "baseline"), "Ascend": ("huawei.com/Ascend910", "privileged")}
"""The device, and the standard that its pods keep to: those on Ascend mount the driver's files of their node."""
SMALL = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}
# Scheduling is over when a pod has a node: Ray need not start in it.
WAITS = {"name": "waits", "image": definition("trainer-cpu").tagged, "command": ["sleep", "infinity"]}


@pytest.mark.parametrize("profile", PROFILES)
def test_pools_are_scheduled_by_their_devices_and_those_beyond_wait(
    cluster: Cluster, namespace: str, profile: str
) -> None:
    device, standard = PROFILES[profile]
    cluster.kubectl("label", "namespace", namespace, f"{ENFORCE}={standard}", "--overwrite")
    cluster.node.offer(OFFERED)
    training = LiveTraining(cluster, namespace, profile.lower())
    training.apply(
        accelerator={"profile": profile, "devicesPerNode": 3},
        rollout={"nodes": 2, "minNodes": 1, "maxNodes": 2},
        train={"nodes": 1, "batch": {"promptsPerUpdate": 30}},
        pods={"image": definition("trainer-cpu").tagged} | dict.fromkeys(("head", "rollout", "train"), _small()),
        failurePolicy={"maxRestarts": 0},
    )
    training.until(lambda: len(training.mine("pods")) == 4, "head, two of rollout, one of train")
    training.until(lambda: len(_scheduled(training, device)) == 2, "six of eight devices are taken")
    training.until(lambda: f"Insufficient {device}" in str(training.mine("pods")), "the third waits")
    training.until_condition("Degraded", "True", "PodFault")
    training.delete()
    training.until(lambda: not training.mine("pods"), "nothing is left")


def _small() -> dict[str, Any]:
    """In place of what a node with devices has."""
    ray = {"name": "ray", "resources": SMALL}
    return {"spec": {"containers": [ray], "initContainers": [WAITS], "terminationGracePeriodSeconds": 0}}


def _scheduled(training: LiveTraining, device: str) -> list[str]:
    """Pods that have a node and devices of it."""
    return [
        pod["metadata"]["name"]
        for pod in training.mine("pods")
        if "nodeName" in pod["spec"]
        and any(device in container["resources"].get("limits", {}) for container in pod["spec"]["containers"])
    ]
