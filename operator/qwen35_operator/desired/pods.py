"""The pod template of a pool: the profile's, with the user's parts merged into it.

KubeRay adds to it what starts Ray (command, ports, probes, the init container `wait-gcs-ready`), and takes the container
at index 0 for Ray's.
"""

from typing import Any, Final

from qwen35_operator.api.training import Training
from qwen35_operator.desired import names, volumes
from qwen35_operator.desired.merge import merge
from qwen35_operator.desired.pools import Pool
from qwen35_operator.profiles import PROFILES, Profile, Size
from qwen35_operator.settings import Settings
from qwen35_trainer.contract.names import (
    ATTEMPT_VARIABLE,
    NAMESPACE_VARIABLE,
    POD_VARIABLE,
    POOL_VARIABLE,
    TRAINING_VARIABLE,
)

CONTAINER: Final = "ray"
USER: Final = 1000
"""User and group of the trainer images; HwHiAiUser, who owns the devices, on Ascend nodes."""


def template(training: Training, settings: Settings, pool: Pool, attempt: int) -> dict[str, Any]:
    """The pod template, with spec.pods merged in: it must be within the fence (`overrides.problems`)."""
    return merge(_template(training, settings, pool, attempt), getattr(training.spec.pods, pool))


def size_of(training: Training, pool: Pool) -> Size:
    """What a pod of the pool gets beside its devices."""
    profile, devices = PROFILES[training.spec.accelerator.profile], training.spec.accelerator.perNode
    if pool == "head":
        return profile.head
    one = profile.per_device
    return Size(one.cpu * devices, one.memory_gib * devices, one.shm_gib * devices)


def _template(training: Training, settings: Settings, pool: Pool, attempt: int) -> dict[str, Any]:
    profile = PROFILES[training.spec.accelerator.profile]
    identity = {names.ATTEMPT: str(attempt), names.POOL: pool}
    return {
        "metadata": {"labels": names.labels(training.name, pool) | identity},
        "spec": {
            **_account(training, pool),
            # Ray cannot take a restarted process for the node it was: KubeRay replaces the pod.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": profile.grace_seconds,
            # A Service called "ray" would otherwise set RAY_PORT.
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                # Else every start walks over the whole model.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_tolerations(profile, pool),
            "containers": [_container(training, settings, pool, attempt)],
            "volumes": volumes.volumes(training, profile, pool, size_of(training, pool).shm_gib),
        },
    }


def _container(training: Training, settings: Settings, pool: Pool, attempt: int) -> dict[str, Any]:
    profile = PROFILES[training.spec.accelerator.profile]
    return {
        "name": CONTAINER,
        "image": training.spec.pods.image or settings.images[training.spec.accelerator.profile],
        "env": _environment(training, profile, pool, attempt),
        "resources": _resources(training, profile, pool),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": volumes.mounts(training, profile, pool),
    }


def _account(training: Training, pool: Pool) -> dict[str, Any]:
    """Only the driver speaks to the API server."""
    if pool == "head":
        return {"serviceAccountName": names.account_name(training.name), "automountServiceAccountToken": True}
    return {"automountServiceAccountToken": False}


def _environment(training: Training, profile: Profile, pool: Pool, attempt: int) -> list[dict[str, Any]]:
    """Ours, the profile's, the user's: the later wins, and none of the user's has a name of ours."""
    values = {
        TRAINING_VARIABLE: training.name,
        NAMESPACE_VARIABLE: training.namespace,
        ATTEMPT_VARIABLE: str(attempt),
        POOL_VARIABLE: pool,
        # Nothing is sent anywhere that nobody asked for.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if pool == "head":
        # Ray kills a job 3 s after the SIGTERM that stops it, as when its RayJob is deleted. The trainer needs longer to save, or
        # to tell the operator that it could not: it has as long as its pod.
        values["RAY_JOB_STOP_WAIT_TIME_S"] = str(profile.grace_seconds)
    else:
        values |= profile.environment
    found: dict[str, dict[str, Any]] = {name: {"name": name, "value": value} for name, value in values.items()}
    found[POD_VARIABLE] = {"name": POD_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    for variable in training.spec.pods.environment:
        written: dict[str, Any] = {"value": variable.value}
        if variable.secret is not None:
            written = {"valueFrom": {"secretKeyRef": {"name": variable.secret.name, "key": variable.secret.key}}}
        found[variable.name] = {"name": variable.name} | written
    return list(found.values())


def _resources(training: Training, profile: Profile, pool: Pool) -> dict[str, Any]:
    """No limit of CPU: throttling a collective slows every rank. Memory is limited, for Ray sizes itself by it."""
    size = size_of(training, pool)
    memory = {"memory": _gibibytes(size.memory_gib)}
    devices = {}
    if pool != "head" and profile.resource is not None:
        devices = {profile.resource: str(training.spec.accelerator.perNode)}
    return {"requests": {"cpu": _cores(size.cpu)} | memory | devices, "limits": memory | devices}


def _cores(count: float) -> str:
    """As Kubernetes writes quantities: KubeRay would otherwise seem to have changed the object."""
    return f"{count:.0f}" if count == int(count) else f"{count * 1000:.0f}m"


def _gibibytes(count: int) -> str:
    """As Kubernetes writes quantities, too."""
    return f"{count // 1024}Ti" if count % 1024 == 0 else f"{count}Gi"


def _tolerations(profile: Profile, pool: Pool) -> dict[str, Any]:
    """Nodes with devices are tainted with the resource's name by custom, so that nothing else lands there."""
    if pool == "head" or profile.resource is None:
        return {}
    return {"tolerations": [{"key": profile.resource, "operator": "Exists", "effect": "NoSchedule"}]}
