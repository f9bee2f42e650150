"""Builds the RayJob of an attempt: one Ray cluster, with a head without devices and a worker group for each other pool.

The operator never writes `suspend`, which belongs to Kueue. KubeRay does not retry: the operator starts the next
attempt by its own rules. Checked against KubeRay 1.6.1 (controllers/ray/utils/validation.go) and later.
"""

import re
from importlib.metadata import requires
from typing import Any, Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.desired import object_names, pod_templates
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_operator.desired.pools import WorkerPool, worker_pools
from qwen35_operator.desired.queueing import copied_to_job
from qwen35_operator.device_profiles import PROFILES
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer.contract.shared_names import CONFIG_FOLDER, CONFIG_KEY, RUN_FOLDER


def _pinned_ray_version() -> str:
    """Return the version of Ray that this package requires. The trainer images are built with the same version."""
    pins = (re.match(r"ray\[default\]==([\d.]+)", requirement) for requirement in requires("qwen35") or ())
    return next(pin[1] for pin in pins if pin)


RAY_VERSION: Final = _pinned_ray_version()
ENTRYPOINT: Final = f"qwen35 run {CONFIG_FOLDER}/{CONFIG_KEY} --output {RUN_FOLDER} --resume auto --link cluster"


def build(training: TrainingResource, settings: OperatorSettings, *, attempt: int, rollout_nodes: int) -> KubeObject:
    """Return the RayJob of an attempt.

    rollout_nodes: the number of nodes with which the rollout pool starts; ignored if the mode has no separate rollout
    pool.
    """
    name = object_names.job_name(training.name, attempt)
    identity = {object_names.ATTEMPT: str(attempt)}
    groups = [_group(training, settings, attempt, pool, rollout_nodes) for pool in worker_pools(training.spec)]
    return sealed(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata(
                training,
                name,
                "job",
                labels=copied_to_job(training.labels) | identity,
                annotations=copied_to_job(training.annotations)
                | {object_names.SPEC_HASH: object_names.spec_hash(training)},
            ),
            "spec": {
                "submissionMode": "HTTPMode",
                "entrypoint": ENTRYPOINT,
                # Constant for this training, but different from an earlier training of the same name.
                "jobId": f"{name}-{training.uid[:8]}",
                "backoffLimit": 0,
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {
                    "rayVersion": RAY_VERSION,
                    "enableInTreeAutoscaling": False,
                    "headGroupSpec": _common(training, settings, attempt, "head"),
                    "workerGroupSpecs": groups,
                },
            },
        }
    )


def _common(training: TrainingResource, settings: OperatorSettings, attempt: int, pool: PodPool) -> dict[str, Any]:
    return {
        # KubeRay turns this into a pod label and a Ray node label; the latter places actors.
        "labels": {object_names.POOL: pool},
        "resources": _ray_resources(training, pool),
        "rayStartParams": {},
        "template": pod_templates.template(training, settings, pool, attempt),
    }


def _group(
    training: TrainingResource, settings: OperatorSettings, attempt: int, pool: WorkerPool, rollout_nodes: int
) -> dict[str, Any]:
    replicas = min_replicas = max_replicas = training.spec.train.nodes
    if pool == "rollout":
        assert training.spec.rollout is not None, "the spec's own checks require it"
        bounds = training.spec.rollout
        replicas = rollout_nodes
        min_replicas = min(bounds.minNodes or replicas, replicas)
        max_replicas = max(bounds.maxNodes or replicas, replicas)
    counts = {"groupName": pool, "replicas": replicas, "minReplicas": min_replicas, "maxReplicas": max_replicas}
    return counts | _common(training, settings, attempt, pool)


def _ray_resources(training: TrainingResource, pool: PodPool) -> dict[str, str]:
    """Return the resources of a pool's pods for Ray's scheduler.

    The head has no CPU and no device: only the driver runs there.
    """
    if pool == "head":
        return {"CPU": "0"}
    profile, devices = PROFILES[training.spec.accelerator.profile], training.spec.accelerator.devicesPerNode
    # At least one CPU for each worker process.
    cpus = {"CPU": str(max(devices, int(pod_templates.size_of(training, pool).cpu)))}
    return cpus if profile.ray_resource is None else cpus | {profile.ray_resource: str(devices)}
