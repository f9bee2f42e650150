"""Builds the pod template of a pool: the device profile's template, merged with the user's changes.

KubeRay adds what starts Ray (command, ports, probes, the init container `wait-gcs-ready`), and treats the container at
index 0 as Ray's.
"""

from typing import Any, Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.desired import object_names, ray_tls, volumes
from qwen35_operator.desired.pod_overrides.merge import merge
from qwen35_operator.desired.pod_size import size_of
from qwen35_operator.device_profiles import PROFILES, DeviceProfile
from qwen35_trainer.contract.shared_names import (
    ATTEMPT_VARIABLE,
    INLINE_ANSWERS,
    NAMESPACE_VARIABLE,
    POD_VARIABLE,
    POOL_VARIABLE,
    TRAINING_VARIABLE,
    UID_VARIABLE,
)

CONTAINER: Final = "ray"
DISRUPTION_ANNOTATIONS: Final = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations of pods that autoscalers of nodes must not move to save a node."""
ZONE_LABEL: Final = "topology.kubernetes.io/zone"
"""Label of nodes whose value the nodes of a training should share: between zones, networks are slow and charged."""
USER_ID: Final = 1000
"""Numeric id of the user and of the group of the trainer images. On Ascend nodes this user is HwHiAiUser, which owns
the devices."""
DEFAULT_GRACE_SECONDS: Final = 30
"""Grace period of Kubernetes for a pod that names none: null removes the profile's."""
SECURITY_CONTEXT: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""Field securityContext of the operator's containers."""


def template(training: TrainingResource, image: str, pool: PodPool, attempt: int) -> dict[str, Any]:
    """Return the pod template of a pool, with the user's changes from spec.pods merged into it.

    image: the trainer image. The changes must have passed `reserved_fields.problems`.
    """
    return merge(_template(training, image, pool, attempt), getattr(training.spec.pods, pool))


def _template(training: TrainingResource, image: str, pool: PodPool, attempt: int) -> dict[str, Any]:
    profile = PROFILES[training.spec.accelerator.profile]
    identity = {object_names.ATTEMPT: str(attempt), object_names.POOL: pool}
    return {
        "metadata": {"labels": object_names.labels(training.name, pool) | identity, **_annotations(pool)},
        "spec": {
            **_account(training, pool),
            # A restarted process cannot rejoin Ray as the same node, so KubeRay replaces the pod.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": profile.grace_seconds,
            # Otherwise a Service called "ray" would set RAY_PORT.
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                # Otherwise every start would change the ownership of every file of the model.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_tolerations(profile, pool),
            "affinity": _affinity(training),
            **ray_tls.init_containers(training.spec, image, pool, SECURITY_CONTEXT),
            "containers": [_container(training, image, pool, attempt)],
            "volumes": volumes.volumes(training, profile, pool, size_of(training, pool).shm_gib),
        },
    }


def _container(training: TrainingResource, image: str, pool: PodPool, attempt: int) -> dict[str, Any]:
    profile = PROFILES[training.spec.accelerator.profile]
    return {
        "name": CONTAINER,
        "image": image,
        "env": _environment(training, profile, pool, attempt),
        "resources": _resources(training, profile, pool),
        "securityContext": SECURITY_CONTEXT,
        "volumeMounts": volumes.mounts(training, profile, pool),
    }


def _grace_seconds(training: TrainingResource, profile: DeviceProfile) -> int:
    """Return the grace period of the head pod, in seconds: that of the user's change, or the profile's."""
    spec = training.spec.pods.head.get("spec")
    seconds = (
        spec.get("terminationGracePeriodSeconds", profile.grace_seconds)
        if isinstance(spec, dict)
        else profile.grace_seconds
    )
    return seconds if isinstance(seconds, int) else DEFAULT_GRACE_SECONDS


def _account(training: TrainingResource, pool: PodPool) -> dict[str, Any]:
    """Return the fields of the pod's spec that name its ServiceAccount and mount the account's token.

    Only the head gets the account and its token, because only the driver contacts the API server.
    """
    if pool == "head":
        return {"serviceAccountName": object_names.account_name(training.name), "automountServiceAccountToken": True}
    return {"automountServiceAccountToken": False}


def _environment(
    training: TrainingResource, profile: DeviceProfile, pool: PodPool, attempt: int
) -> list[dict[str, Any]]:
    """Return the environment variables of the container `ray`, set by the operator, the device profile and the user.

    A user's variable replaces any other variable of the same name. `reserved_fields` has refused the names that must
    not be replaced. The head has no variables of the device profile.
    """
    values = {
        TRAINING_VARIABLE: training.name,
        NAMESPACE_VARIABLE: training.namespace,
        ATTEMPT_VARIABLE: str(attempt),
        UID_VARIABLE: training.uid,
        POOL_VARIABLE: pool,
        # Send no usage statistics.
        "RAY_USAGE_STATS_ENABLED": "0",
        **INLINE_ANSWERS,
        **ray_tls.variables(training.spec),
    }
    if pool == "head":
        # By default Ray kills a job 3 s after its SIGTERM, for example when its RayJob is deleted. The trainer needs longer to
        # save, or to report that it could not: it gets as long as its pod.
        values["RAY_JOB_STOP_WAIT_TIME_S"] = str(_grace_seconds(training, profile))
    else:
        values |= profile.environment
    variables: dict[str, dict[str, Any]] = {name: {"name": name, "value": value} for name, value in values.items()}
    variables[POD_VARIABLE] = {"name": POD_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    for variable in training.spec.pods.env:
        written: dict[str, Any] = {"value": variable.value}
        if variable.valueFrom is not None:
            reference = variable.valueFrom.secretKeyRef
            written = {"valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}
        variables[variable.name] = {"name": variable.name} | written
    return list(variables.values())


def _resources(training: TrainingResource, profile: DeviceProfile, pool: PodPool) -> dict[str, Any]:
    """Return the requests and limits of the container `ray`.

    CPU has no limit: if the CPU of one rank were throttled, all ranks would wait for that rank in their collectives.
    Memory has a limit, because Ray sizes its object store by that limit.
    """
    size = size_of(training, pool)
    memory = {"memory": _gibibytes(size.memory_gib)}
    devices = {}
    if pool != "head" and profile.resource is not None:
        devices = {profile.resource: str(training.spec.accelerator.devicesPerNode)}
    return {"requests": {"cpu": _cores(size.cpu)} | memory | devices, "limits": memory | devices}


def _cores(count: float) -> str:
    """Format a number of CPUs in the form that the API server stores: "8", or "250m" for a quarter of a CPU.

    In another form, the stored value would differ from the value that the operator wrote, as if somebody had changed
    it.
    """
    return f"{count:.0f}" if count == int(count) else f"{count * 1000:.0f}m"


def _gibibytes(count: int) -> str:
    """Format an amount of memory in the form that the API server stores: "64Gi", or "1Ti". count: GiB."""
    return f"{count // 1024}Ti" if count % 1024 == 0 else f"{count}Gi"


def _annotations(pool: PodPool) -> dict[str, Any]:
    """Return the field `annotations` of a pod whose loss ends the attempt; {} for a pod that can be replaced while it runs."""
    return {} if pool == object_names.ROLLOUT else {"annotations": DISRUPTION_ANNOTATIONS}


def _affinity(training: TrainingResource) -> dict[str, Any]:
    """Return the affinity by which the pods of a training prefer one zone. Where none has room for all, they start anyway."""
    own = {"matchLabels": {object_names.TRAINING: training.name}}
    term = {"weight": 100, "podAffinityTerm": {"labelSelector": own, "topologyKey": ZONE_LABEL}}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


def _tolerations(profile: DeviceProfile, pool: PodPool) -> dict[str, Any]:
    """Return the field `tolerations` of a pod that needs devices; {} for a pod that does not.

    Nodes with devices conventionally have a taint, whose key is the resource name of the device. The toleration lets
    the pod run there.
    """
    if pool == "head" or profile.resource is None:
        return {}
    return {"tolerations": [{"key": profile.resource, "operator": "Exists", "effect": "NoSchedule"}]}
