"""The RayJob of an attempt: one Ray cluster with a head without devices and a worker group per pool.

`suspend` is never written: it is Kueue's. No retries: the operator starts the next attempt itself, by its rules.
Checked against KubeRay 1.6.1 (controllers/ray/utils/validation.go) and later.
"""

import re
from importlib.metadata import requires
from typing import Any, Final

from qwen35_operator.api.training import Training
from qwen35_operator.desired import names, pods
from qwen35_operator.desired.objects import Manifest, metadata, sealed
from qwen35_operator.desired.pools import Pool, WorkerPool, worker_pools
from qwen35_operator.desired.queueing import handed_on
from qwen35_operator.profiles import PROFILES
from qwen35_operator.settings import Settings
from qwen35_trainer.contract.names import CONFIG_FOLDER, CONFIG_KEY, RUN_FOLDER


def _pinned() -> str:
    """Ray's version in this distribution's own requirements: what the trainer images are built with."""
    pins = (re.match(r"ray\[default\]==([\d.]+)", requirement) for requirement in requires("qwen35") or ())
    return next(pin[1] for pin in pins if pin)


RAY_VERSION: Final = _pinned()
ENTRYPOINT: Final = f"qwen35 run {CONFIG_FOLDER}/{CONFIG_KEY} --output {RUN_FOLDER} --resume auto --link cluster"


def build(training: Training, settings: Settings, *, attempt: int, rollout_nodes: int) -> Manifest:
    """The RayJob. rollout_nodes: nodes that the rollout pool starts with; of no meaning where there is none."""
    name = names.job_name(training.name, attempt)
    identity = {names.ATTEMPT: str(attempt)}
    groups = [_group(training, settings, attempt, pool, rollout_nodes) for pool in worker_pools(training.spec)]
    return sealed(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata(
                training,
                name,
                "job",
                labels=handed_on(training.labels) | identity,
                annotations=handed_on(training.annotations) | {names.SPEC_HASH: names.spec_hash(training)},
            ),
            "spec": {
                "submissionMode": "HTTPMode",
                "entrypoint": ENTRYPOINT,
                # The same however often KubeRay asks, and another for a training of this name that came before.
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


def _common(training: Training, settings: Settings, attempt: int, pool: Pool) -> dict[str, Any]:
    return {
        # KubeRay makes a pod label and a Ray node label of it: actors are placed by the latter.
        "labels": {names.POOL: pool},
        "resources": _ray_resources(training, pool),
        "rayStartParams": {},
        "template": pods.template(training, settings, pool, attempt),
    }


def _group(
    training: Training, settings: Settings, attempt: int, pool: WorkerPool, rollout_nodes: int
) -> dict[str, Any]:
    replicas = least = most = training.spec.train.nodes
    if pool == "rollout":
        assert training.spec.rollout is not None, "the spec's own checks require it"
        bounds = training.spec.rollout
        replicas = rollout_nodes
        least, most = min(bounds.minNodes or replicas, replicas), max(bounds.maxNodes or replicas, replicas)
    counts = {"groupName": pool, "replicas": replicas, "minReplicas": least, "maxReplicas": most}
    return counts | _common(training, settings, attempt, pool)


def _ray_resources(training: Training, pool: Pool) -> dict[str, str]:
    """What Ray hands out, in its own names. The head has none, so that only the driver runs there."""
    if pool == "head":
        return {"CPU": "0"}
    profile, devices = PROFILES[training.spec.accelerator.profile], training.spec.accelerator.perNode
    # At least one for each worker process.
    cpus = {"CPU": str(max(devices, int(pods.size_of(training, pool).cpu)))}
    return cpus if profile.ray_resource is None else cpus | {profile.ray_resource: str(devices)}
