"""The fields of the pod templates that are reserved for the operator, and why users cannot set them.

With other values, Ray would not start as KubeRay expects, or the driver, KubeRay or the NetworkPolicy would not
recognize a pod of the training. Users may set all other fields of a pod's spec, and add labels, annotations,
containers, init containers, volumes and mounts.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.desired import ray_tls, volumes
from qwen35_operator.desired.pod_overrides import shape
from qwen35_operator.desired.pod_size import size_of
from qwen35_operator.desired.pod_templates import CONTAINER
from qwen35_operator.desired.pools import all_pools
from qwen35_operator.desired.problem_limits import field_of, first_problems
from qwen35_operator.device_profiles import PROFILES, DeviceProfile
from qwen35_trainer.contract.shared_names import CLUSTER_VARIABLE, POD_VARIABLE
from qwen35_trainer.manifest import Problem

POOLS: Final[tuple[PodPool, ...]] = ("head", "rollout", "train")
LABEL_PREFIXES: Final = ("rl.qwen35.io/", "ray.io/", "app.kubernetes.io/", "kueue.x-k8s.io/queue-name")
"""Prefixes of reserved labels. The NetworkPolicy, KubeRay and KubeRay's head Service select pods by labels with the
first three prefixes. Kueue would queue a pod with the last label separately from its job."""
ANNOTATION_PREFIXES: Final = ("rl.qwen35.io/", "ray.io/")
"""Prefixes of reserved annotations, such as ray.io/overwrite-container-cmd, which changes the command of Ray."""
VARIABLES: Final = frozenset(
    {
        POD_VARIABLE,
        *("FQ_RAY_IP", "RAY_IP", "RAY_PORT", "RAY_ADDRESS", CLUSTER_VARIABLE, "RAY_CLUSTER_NAMESPACE"),
        *("RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME", "KUBERAY_GEN_RAY_START_CMD"),
        # KubeRay refuses a cluster with these variables unless its own options set them.
        *("RAY_REDIS_ADDRESS", "REDIS_USERNAME", "REDIS_PASSWORD", "RAY_enable_autoscaler_v2"),
        # Ray's token authentication: KubeRay sets them to the token that it also uses itself.
        *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"),
    }
)
"""Environment variables that the operator or KubeRay sets, or that KubeRay refuses. Users cannot set them, nor any
variable that begins with QWEN35_."""
POD_FIELDS: Final[Mapping[str, str]] = {
    "restartPolicy": "KubeRay replaces a pod whose Ray has ended.",
    "serviceAccountName": "Grant missing permissions to the account that the operator creates.",
    "serviceAccount": "Grant missing permissions to the account that the operator creates.",
    "automountServiceAccountToken": "Only the driver contacts the API server.",
    "hostNetwork": "NetworkPolicies do not apply to such pods, and Ray's ports conflict; use a device plugin or a second network.",
    "hostname": "Reports identify pods by their hostname.",
    "hostnameOverride": "Reports identify pods by their hostname.",
    "setHostnameAsFQDN": "Reports identify pods by their hostname.",
    "ephemeralContainers": "Pod templates cannot have them; use kubectl debug.",
}
"""Reserved fields of a pod's spec. The text gives the reason, or what to do instead."""
RAY_CONTAINER_FIELDS: Final[Mapping[str, str]] = {
    "image": "Use spec.pods.image, which applies to every pool: Ray needs the same version everywhere.",
    "command": "KubeRay writes it; a lifecycle hook or an init container runs before Ray.",
    "args": "KubeRay writes them; a lifecycle hook or an init container runs before Ray.",
}
"""Reserved fields of the container `ray`. The text says what to do instead."""
RAY_PORTS: Final[Mapping[PodPool, Mapping[int, str]]] = {
    "head": {6379: "gcs-server", 8080: "metrics", 8265: "dashboard", 10001: "client", 52365: "dashboard-agent"},
    "rollout": {8080: "metrics", 52365: "dashboard-agent"},
    "train": {8080: "metrics", 52365: "dashboard-agent"},
}
"""Ports that Ray listens on in the pods of each pool, with KubeRay's names for the ports. All containers of a pod share
its ports."""
RESERVED_CONTAINERS: Final = ("wait-gcs-ready", "autoscaler", "ray-job-submitter")
"""Names of containers that KubeRay adds."""


def problems(training: TrainingResource) -> Iterator[Problem]:
    """Yield a problem for each part of spec.pods that is malformed or that users cannot set."""
    names = [variable.name for variable in training.spec.pods.env]
    yield from _variables(names, "spec.pods.env")
    yield from _tls_variables(training, names, "spec.pods.env")
    for pool in POOLS:
        change, place = getattr(training.spec.pods, pool), f"spec.pods.{pool}"
        if not change:
            continue
        if pool not in all_pools(training.spec):
            message = f"mode {training.spec.mode} has no separate {pool} pool."
            yield Problem(place, message, "Remove it, or set it for spec.pods.train.")
        malformed = list(first_problems(shape.problems(change, place)))
        yield from malformed or _reserved(training, pool, change, place)


def _reserved(training: TrainingResource, pool: PodPool, change: Mapping[str, Any], place: str) -> Iterator[Problem]:
    yield from _unknown(change, ("metadata", "spec"), place)
    metadata, spec = change.get("metadata", {}), change.get("spec", {})
    yield from _unknown(metadata, ("labels", "annotations"), f"{place}.metadata")
    yield from _prefixed(metadata.get("labels", {}), LABEL_PREFIXES, f"{place}.metadata.labels")
    yield from _prefixed(metadata.get("annotations", {}), ANNOTATION_PREFIXES, f"{place}.metadata.annotations")
    if training.spec.pods.tls is not None:
        yield from ray_tls.problems(change, CONTAINER, place)
    for name, why in POD_FIELDS.items():
        if name in spec:
            yield Problem(f"{place}.spec.{name}", "is set by the operator.", f"Remove it. {why}")
    profile = PROFILES[training.spec.accelerator.profile]
    existing = volumes.volumes(training, profile, pool, size_of(training, pool).shm_gib)
    reserved = {volume["name"] for volume in existing} | set(volumes.OWN_VOLUMES)
    of_node = {volume["name"] for volume in existing if "hostPath" in volume}
    for index, volume in enumerate(spec.get("volumes", ())):
        if volume["name"] in reserved:
            here = f"{place}.spec.volumes[{index}].name"
            yield Problem(here, f"the operator has a volume {volume['name']} too.", "Give yours another name.")
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind, ())):
            here = f"{place}.spec.{kind}[{index}]"
            yield from _container(container, profile, here)
            yield from _mounts_of_node(container, of_node, here)
            yield from _ports(container.get("ports", ()), pool, here, own=container["name"] == CONTAINER)
            if kind == "containers" and container["name"] == CONTAINER:
                yield from _ray_container(training, profile, pool, container, here)
            elif container["name"] in (CONTAINER, *RESERVED_CONTAINERS):
                message = f"{container['name']} is the name of another container."
                yield Problem(f"{here}.name", message, "Give yours another name.")


def _container(container: Mapping[str, Any], profile: DeviceProfile, place: str) -> Iterator[Problem]:
    """Yield a problem for each request or limit of devices in a container of the user's change.

    The operator sets the number of devices, from accelerator.devicesPerNode. place: the path of the container in the
    manifest.
    """
    for part, amounts in container.get("resources", {}).items():
        if isinstance(amounts, Mapping) and profile.resource in amounts:
            message = f"{amounts[profile.resource]} {profile.resource}: the operator sets the number of devices."
            yield Problem(f"{place}.resources.{part}", message, "Use spec.accelerator.devicesPerNode.")


def _mounts_of_node(container: Mapping[str, Any], of_node: set[str], place: str) -> Iterator[Problem]:
    """Yield a problem for each mount through which a container could write to a file or folder of the Kubernetes node.

    A program that can change the driver of a node can take over the node. The policy for spec.pods does not see these
    volumes, because the operator adds them. of_node: names of the operator's volumes with hostPath. place: the path of
    the container in the manifest.
    """
    for index, mount in enumerate(container.get("volumeMounts", ())):
        if mount.get("name") in of_node and mount.get("readOnly") is not True:
            message = (
                f"the volume {mount['name']} is a file or folder of the Kubernetes node, which no container may change."
            )
            yield Problem(f"{place}.volumeMounts[{index}].readOnly", message, "Set readOnly: true.")


def _ports(ports: Sequence[Mapping[str, Any]], pool: PodPool, place: str, *, own: bool) -> Iterator[Problem]:
    """Yield a problem for each port of a container that conflicts with Ray's ports.

    own: whether the container is `ray`. KubeRay copies the ports of the container `ray` to the head's Service, and adds
    Ray's ports only if that container has none. place: the path of the container in the manifest.
    """
    if own and pool == "head" and ports:
        message = "the head's Service would have these ports instead of Ray's: KubeRay could not reach the dashboard."
        yield Problem(f"{place}.ports", message, "Remove them: ports of pods are reachable without being listed.")
        return
    ray_ports = RAY_PORTS[pool]
    for index, port in enumerate(ports):
        number, name, here = port["containerPort"], port.get("name"), f"{place}.ports[{index}]"
        if number in ray_ports and port.get("protocol", "TCP") == "TCP":
            yield Problem(f"{here}.containerPort", f"Ray uses {number} ({ray_ports[number]}).", "Use another port.")
        elif own and name in RAY_PORTS["head"].values():
            yield Problem(f"{here}.name", f"{name} is the name of one of Ray's ports.", "Give yours another name.")


def _ray_container(
    training: TrainingResource, profile: DeviceProfile, pool: PodPool, container: Mapping[str, Any], place: str
) -> Iterator[Problem]:
    for name, instead in RAY_CONTAINER_FIELDS.items():
        if name in container:
            yield Problem(f"{place}.{name}", f"is set by the operator in the container {CONTAINER}.", instead)
    names = [variable["name"] for variable in container.get("env", ())]
    yield from _variables(names, f"{place}.env")
    yield from _tls_variables(training, names, f"{place}.env")
    mounted = {mount["mountPath"] for mount in volumes.mounts(training, profile, pool)} | set(volumes.OWN_FOLDERS)
    for index, mount in enumerate(container.get("volumeMounts", ())):
        if other := next((path for path in sorted(mounted) if _overlap(str(mount["mountPath"]), path)), None):
            message = f"{mount['mountPath']} overlaps {other}, which the operator mounts."
            yield Problem(f"{place}.volumeMounts[{index}].mountPath", message, "Mount it elsewhere.")


def _variables(names: list[str], place: str) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if str(name).startswith("QWEN35_") or name in VARIABLES:
            yield Problem(f"{place}[{index}].name", f"{name} is set by the operator or by KubeRay.", "Remove it.")


def _tls_variables(training: TrainingResource, names: list[str], place: str) -> Iterator[Problem]:
    """Yield a problem for each variable of Ray's TLS that the operator sets. Without pods.tls, users may set them."""
    for index, name in enumerate(names):
        if name in ray_tls.variables(training.spec):
            yield Problem(f"{place}[{index}].name", f"{name} is set by the operator, for spec.pods.tls.", "Remove it.")


def _unknown(fields: Mapping[str, Any], allowed: tuple[str, ...], place: str) -> Iterator[Problem]:
    for key in fields:
        if key not in allowed:
            yield Problem(field_of(place, key), "cannot be set.", f"Remove it; allowed: {', '.join(allowed)}.")


def _prefixed(entries: Mapping[str, Any], reserved: tuple[str, ...], place: str) -> Iterator[Problem]:
    for key in entries:
        if prefix := next((prefix for prefix in reserved if key.startswith(prefix)), None):
            fix = "Remove it. Queue labels belong to the training's own metadata.labels."
            yield Problem(field_of(place, key), f"{prefix} is reserved for the operator and KubeRay.", fix)


def _overlap(folder: str, other: str) -> bool:
    """Return whether the two folders are the same, or one contains the other."""
    first, second = (posixpath.normpath(posixpath.join("/", path)).rstrip("/") + "/" for path in (folder, other))
    return first.startswith(second) or second.startswith(first)
