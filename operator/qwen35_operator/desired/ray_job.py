"""Builds the RayJob of an attempt: one Ray cluster, with a head without devices and a worker group for each other pool.

The operator never writes `suspend`, which belongs to Kueue. KubeRay does not retry: the operator starts the next
attempt by its own rules. Checked against KubeRay 1.5.1 and 1.6.1 (controllers/ray/utils/validation.go).
"""

from typing import Any, Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.desired import object_names, pod_size, pod_templates
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_operator.desired.pools import WorkerPool, worker_pools
from qwen35_operator.desired.queueing import copied_to_job
from qwen35_operator.desired.spec_hash import spec_hash
from qwen35_operator.desired.trainer_release import TrainerRelease, present
from qwen35_operator.device_profiles import PROFILES
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer.contract.shared_names import CONFIG_FOLDER, CONFIG_KEY, RUN_FOLDER

RAY_START_PARAMETERS: Final = {"include-log-monitor": "0"}
"""Parameters of `ray start` in every pod. The log monitor sends the output of workers to drivers, and the trainer does not
receive it. Not "false": KubeRay drops parameters with this value."""
HEAD_START_PARAMETERS: Final = RAY_START_PARAMETERS | {"no-monitor": "true"}
"""Those of the head. The monitor runs Ray's autoscaler, which is off."""
ENTRYPOINT: Final = f"qwen35 run {CONFIG_FOLDER}/{CONFIG_KEY} --output {RUN_FOLDER} --resume auto --link cluster"


def build(
    training: TrainingResource,
    settings: OperatorSettings,
    *,
    attempt: int,
    rollout_nodes: int,
    release: TrainerRelease | None = None,
) -> KubeObject:
    """Return the RayJob of an attempt.

    rollout_nodes: the number of nodes with which the rollout pool starts; ignored if the mode has no separate rollout
    pool. release: trainer image and version of Ray; None for those of this operator.
    """
    release = release or present(training, settings)
    name = object_names.job_name(training.name, attempt)
    identity = {object_names.ATTEMPT: str(attempt)}
    groups = [
        group
        for pool in worker_pools(training.spec)
        for group in _groups(training, release.image, attempt, pool, rollout_nodes)
    ]
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
                | {object_names.SPEC_HASH: spec_hash(training), object_names.IMAGE: release.reference}
                | ({object_names.UPDATE: release.request} if release.request else {}),
            ),
            "spec": {
                "submissionMode": "HTTPMode",
                "entrypoint": ENTRYPOINT,
                # Constant for this training, but different from an earlier training of the same name.
                "jobId": f"{name}-{training.uid[:8]}",
                "backoffLimit": 0,
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {
                    "rayVersion": release.ray_version,
                    "enableInTreeAutoscaling": False,
                    # KubeRay generates a token for each cluster, and gives it to the pods. Ray then refuses calls without it.
                    "authOptions": {"mode": "token"},
                    "headGroupSpec": _common(training, release.image, attempt, "head"),
                    "workerGroupSpecs": groups,
                },
            },
        }
    )


def _common(training: TrainingResource, image: str, attempt: int, pool: PodPool) -> dict[str, Any]:
    return {
        # KubeRay turns this into a pod label and a Ray node label; the latter places actors.
        "labels": {object_names.POOL: pool},
        "resources": _ray_resources(training, pool),
        "rayStartParams": HEAD_START_PARAMETERS if pool == "head" else RAY_START_PARAMETERS,
        "template": pod_templates.template(training, image, pool, attempt),
    }


def _groups(
    training: TrainingResource, image: str, attempt: int, pool: WorkerPool, rollout_nodes: int
) -> list[dict[str, Any]]:
    """Return the worker groups of a pool: one, and a second one for the straggler lane of the pool rollout.

    The group of the lane never changes its size. The label LANE distinguishes the pods and Ray nodes of both groups.
    """
    common = _common(training, image, attempt, pool)
    if pool == "train":
        nodes = training.spec.train.nodes
        return [_counts("train", nodes, nodes, nodes) | common]
    bounds, lane = training.spec.rollout, training.spec.lane_nodes
    assert bounds is not None, "the spec's own checks require it"
    least = min(max(bounds.minNodes or rollout_nodes, lane + 1), rollout_nodes) - lane
    most = max(bounds.maxNodes or rollout_nodes, rollout_nodes) - lane
    counts = _counts("rollout", rollout_nodes - lane, least, most)
    if not lane:
        return [counts | common]
    labels = [common["labels"] | {object_names.LANE: value} for value in ("false", "true")]
    lane_counts = _counts(object_names.LANE_GROUP, lane, lane, lane)
    return [counts | common | {"labels": labels[0]}, lane_counts | common | {"labels": labels[1]}]


def _counts(name: str, replicas: int, least: int, most: int) -> dict[str, Any]:
    return {"groupName": name, "replicas": replicas, "minReplicas": least, "maxReplicas": most}


def _ray_resources(training: TrainingResource, pool: PodPool) -> dict[str, str]:
    """Return the resources of a pool's pods for Ray's scheduler.

    The head has no CPU and no device: only the driver runs there.
    """
    if pool == "head":
        return {"CPU": "0"}
    profile, devices = PROFILES[training.spec.accelerator.profile], training.spec.accelerator.devicesPerNode
    # At least one CPU for each worker process.
    cpus = {"CPU": str(max(devices, int(pod_size.size_of(training, pool).cpu)))}
    return cpus if profile.ray_resource is None else cpus | {profile.ray_resource: str(devices)}
