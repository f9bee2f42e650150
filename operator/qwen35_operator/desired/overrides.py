"""The fence around spec.pods: which parts of the pod templates are the operator's, and why.

A pod that starts without them is no part of the training: the driver, KubeRay or the NetworkPolicy would not know it.
All that is not fenced in may be set, and extra containers, init containers, volumes and mounts may be added.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from qwen35_operator.api.training import Training
from qwen35_operator.desired import shape, volumes
from qwen35_operator.desired.pods import CONTAINER, size_of
from qwen35_operator.desired.pools import Pool, all_pools
from qwen35_operator.profiles import PROFILES, Profile
from qwen35_trainer.contract.names import POD_VARIABLE
from qwen35_trainer.spec import Problem

POOLS: Final[tuple[Pool, ...]] = ("head", "rollout", "train")
LABELS: Final = ("rl.qwen35.io/", "ray.io/", "app.kubernetes.io/", "kueue.x-k8s.io/queue-name")
"""Selectors of the NetworkPolicy, of KubeRay and its head Service; Kueue would queue the single pod."""
ANNOTATIONS: Final = ("rl.qwen35.io/", "ray.io/")
"""ray.io/overwrite-container-cmd and its like change what KubeRay starts."""
VARIABLES: Final = frozenset(
    {
        POD_VARIABLE,
        *("FQ_RAY_IP", "RAY_IP", "RAY_PORT", "RAY_ADDRESS", "RAY_CLUSTER_NAME", "RAY_CLUSTER_NAMESPACE"),
        *("RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME", "KUBERAY_GEN_RAY_START_CMD"),
        # KubeRay refuses a cluster that has these without its own options for them.
        *("RAY_REDIS_ADDRESS", "REDIS_USERNAME", "REDIS_PASSWORD", "RAY_enable_autoscaler_v2"),
        # Ray's token authentication: KubeRay would need the token too.
        *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"),
    }
)
"""Variables that KubeRay sets, or refuses; those that begin with QWEN35_ are fenced in as well."""
POD: Final[Mapping[str, str]] = {
    "restartPolicy": "A pod whose Ray has ended is replaced.",
    "serviceAccountName": "Grant what is missing to the account that the operator makes.",
    "serviceAccount": "Grant what is missing to the account that the operator makes.",
    "automountServiceAccountToken": "Only the driver speaks to the API server.",
    "hostNetwork": "Policies do not see such pods, and Ray's ports clash; use a device plugin or a second network.",
    "hostname": "Reports name pods by it.",
    "hostnameOverride": "Reports name pods by it.",
    "setHostnameAsFQDN": "Reports name pods by it.",
    "ephemeralContainers": "Pod templates have none; use kubectl debug.",
}
"""Fields of the pod, and why."""
RAY_CONTAINER: Final[Mapping[str, str]] = {
    "image": "Use spec.pods.image, which is that of every pool: Ray needs one version everywhere.",
    "command": "KubeRay writes it; a lifecycle hook or an init container runs before Ray.",
    "args": "KubeRay writes them; a lifecycle hook or an init container runs before Ray.",
}
"""Fields of the container `ray`, and what to do instead."""
PORTS: Final[Mapping[Pool, Mapping[int, str]]] = {
    "head": {6379: "gcs-server", 8080: "metrics", 8265: "dashboard", 10001: "client", 52365: "dashboard-agent"},
    "rollout": {8080: "metrics", 52365: "dashboard-agent"},
    "train": {8080: "metrics", 52365: "dashboard-agent"},
}
"""Ports that Ray listens on, by KubeRay's names for them. All containers of a pod share them."""
RESERVED: Final = ("wait-gcs-ready", "autoscaler", "ray-job-submitter")
"""Names of containers that KubeRay adds."""


def problems(training: Training) -> list[Problem]:
    """Everything in spec.pods that is not the user's to set."""
    found = list(_variables([variable.name for variable in training.spec.pods.environment], "spec.pods.environment"))
    for pool in POOLS:
        change, place = getattr(training.spec.pods, pool), f"spec.pods.{pool}"
        if not change:
            continue
        if pool not in all_pools(training.spec):
            wrong = f"mode {training.spec.mode} has no {pool} pool of its own."
            found.append(Problem(place, wrong, "Remove it, or set it for spec.pods.train."))
        wrongly_shaped = list(shape.problems(change, place))
        found += wrongly_shaped or _fenced(training, pool, change, place)
    return found


def _fenced(training: Training, pool: Pool, change: Mapping[str, Any], place: str) -> Iterator[Problem]:
    yield from _known(change, ("metadata", "spec"), place)
    metadata, spec = change.get("metadata", {}), change.get("spec", {})
    yield from _known(metadata, ("labels", "annotations"), f"{place}.metadata")
    yield from _prefixed(metadata.get("labels", {}), LABELS, f"{place}.metadata.labels")
    yield from _prefixed(metadata.get("annotations", {}), ANNOTATIONS, f"{place}.metadata.annotations")
    for name, why in POD.items():
        if name in spec:
            yield Problem(f"{place}.spec.{name}", "is the operator's to set.", f"Remove it. {why}")
    profile = PROFILES[training.spec.accelerator.profile]
    made = volumes.volumes(training, profile, pool, size_of(training, pool).shm_gib)
    ours = {volume["name"] for volume in made} | set(volumes.OWN_VOLUMES)
    for index, volume in enumerate(spec.get("volumes", ())):
        if volume["name"] in ours:
            here = f"{place}.spec.volumes[{index}].name"
            yield Problem(here, f"the volume {volume['name']} is the operator's.", "Give yours another name.")
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind, ())):
            here = f"{place}.spec.{kind}[{index}]"
            yield from _container(container, profile, here)
            yield from _ports(container.get("ports", ()), pool, here, own=container["name"] == CONTAINER)
            if kind == "containers" and container["name"] == CONTAINER:
                yield from _ray_container(training, profile, pool, container, here)
            elif container["name"] in (CONTAINER, *RESERVED):
                wrong = f"{container['name']} is the name of another container."
                yield Problem(f"{here}.name", wrong, "Give yours another name.")


def _container(container: Mapping[str, Any], profile: Profile, place: str) -> Iterator[Problem]:
    """Of any container: the devices are counted in accelerator.perNode."""
    for part, amounts in container.get("resources", {}).items():
        if isinstance(amounts, Mapping) and profile.resource in amounts:
            wrong = f"{amounts[profile.resource]} {profile.resource}: the operator sets the number of devices."
            yield Problem(f"{place}.resources.{part}", wrong, "Use spec.accelerator.perNode.")


def _ports(ports: Sequence[Mapping[str, Any]], pool: Pool, place: str, *, own: bool) -> Iterator[Problem]:
    """`own`: of the container `ray`. KubeRay makes the head's Service of the ports there, and adds its own to none."""
    if own and pool == "head" and ports:
        wrong = "the head's Service would have these ports, and Ray's no more: KubeRay could not reach the dashboard."
        yield Problem(f"{place}.ports", wrong, "Remove them: pods are reached on ports that are not listed, too.")
        return
    taken = PORTS[pool]
    for index, port in enumerate(ports):
        number, name, here = port["containerPort"], port.get("name"), f"{place}.ports[{index}]"
        if number in taken and port.get("protocol", "TCP") == "TCP":
            yield Problem(f"{here}.containerPort", f"{number} is Ray's ({taken[number]}).", "Use another port.")
        elif own and name in PORTS["head"].values():
            yield Problem(f"{here}.name", f"{name} is the name of a port of Ray.", "Give yours another name.")


def _ray_container(
    training: Training, profile: Profile, pool: Pool, container: Mapping[str, Any], place: str
) -> Iterator[Problem]:
    for name, instead in RAY_CONTAINER.items():
        if name in container:
            yield Problem(f"{place}.{name}", f"is the operator's in the container {CONTAINER}.", instead)
    yield from _variables([variable["name"] for variable in container.get("env", ())], f"{place}.env")
    taken = {mount["mountPath"] for mount in volumes.mounts(training, profile, pool)} | set(volumes.OWN_FOLDERS)
    for index, mount in enumerate(container.get("volumeMounts", ())):
        if other := next((path for path in sorted(taken) if _overlap(str(mount["mountPath"]), path)), None):
            wrong = f"{mount['mountPath']} overlaps {other}, which the operator mounts."
            yield Problem(f"{place}.volumeMounts[{index}].mountPath", wrong, "Mount it elsewhere.")


def _variables(given: list[str], place: str) -> Iterator[Problem]:
    for index, name in enumerate(given):
        if str(name).startswith("QWEN35_") or name in VARIABLES:
            yield Problem(f"{place}[{index}].name", f"{name} is set by the operator or KubeRay.", "Remove it.")


def _known(given: Mapping[str, Any], known: tuple[str, ...], place: str) -> Iterator[Problem]:
    for key in given:
        if key not in known:
            yield Problem(f"{place}.{key}", "is not the user's to set.", f"Remove it; known: {', '.join(known)}.")


def _prefixed(given: Mapping[str, Any], fenced: tuple[str, ...], place: str) -> Iterator[Problem]:
    for key in given:
        if prefix := next((one for one in fenced if key.startswith(one)), None):
            fix = "Remove it. Queue labels belong to the training's own metadata.labels."
            yield Problem(f"{place}.{key}", f"{prefix} is the operator's or KubeRay's.", fix)


def _overlap(one: str, other: str) -> bool:
    """Whether one folder is the other, or lies in it."""
    first, second = (posixpath.normpath(posixpath.join("/", path)).rstrip("/") + "/" for path in (one, other))
    return first.startswith(second) or second.startswith(first)
