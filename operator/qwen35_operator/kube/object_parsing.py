"""Parses raw Kubernetes objects into records. Only the records are kept, because a cluster can have many objects."""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final

from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.desired import object_names
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.desired.queueing import QUEUE_LABEL
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_CLUSTER, RAY_JOB, ObjectKind
from qwen35_operator.kube.object_records import (
    Child,
    MessageConfigMap,
    ObjectRecord,
    Pod,
    RayCluster,
    RayJob,
    WorkerGroup,
)
from qwen35_operator.kube.shared_strings import shared
from qwen35_operator.status.times import parse as parse_time
from qwen35_trainer.contract.message import MAX_MESSAGE_BYTES
from qwen35_trainer.contract.shared_names import CONTROL_KEY, PROGRESS_KEY

RAY_CONTAINER: Final = "ray"
MAX_MESSAGE_CHARACTERS: Final = 512
"""Maximum length of a message of a pod or a cluster; longer messages are cut."""
MAX_JOB_MESSAGE_CHARACTERS: Final = 4096
"""The same for a RayJob, whose message can contain the end of the trainer's log."""
MAX_IMAGE_CHARACTERS, MAX_VERSION_CHARACTERS, MAX_REQUEST_CHARACTERS = 1024, 64, 253
"""Maximum lengths in a status (ReleaseStatus). A RayJob may have longer texts if somebody has edited it; they are cut."""
MAX_STATE_CHARACTERS, MAX_NAME_CHARACTERS, MAX_IMAGE_ID_CHARACTERS = 64, 253, 1024
"""Maximum lengths of a state that KubeRay reports, of a name in a field that the API server does not check, and of an image's id."""
MAX_GROUPS, MAX_LEAVING = 4, 1024
"""Maximum numbers that are read of the worker groups of a RayCluster, and of the pods that a group is to lose. The operator's clusters
have at most three groups, and a rollout pool at most 1,024 nodes."""
MAX_UID_CHARACTERS: Final = 64
"""Maximum length of an owner's uid. Those of the API server have 36 characters, but users may write other owners."""
MAX_HASH_CHARACTERS: Final = 64
"""Maximum length of a hash; those of the operator have 16 characters. An annotation may have 256 KiB, and each object with the
operator's label has a record."""
POOLS: Final[Mapping[str, PodPool]] = {"head": "head", "rollout": "rollout", "train": "train"}
DISRUPTION_REASONS: Final = {
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
}
"""Maps the reason of a pod's condition DisruptionTarget to the reason that the operator reports."""
POD_STATUS_REASONS: Final = {
    "Evicted": "Evicted",
    "NodeLost": "NodeLost",
    "Preempting": "Preempted",
    "NodeShutdown": "NodeLost",
}
"""Maps `status.reason` of a pod that its Kubernetes node has ended to the reason that the operator reports."""
SIDECAR_FAILED: Final = "SidecarFailed"
"""Reason of a pod in which a container other than Ray's, added in spec.pods, has failed."""
STARTING_REASONS: Final = ("ContainerCreating", "PodInitializing")


def record(kind: ObjectKind, raw: KubeObject) -> ObjectRecord:
    """Parse an object into its record.

    Raises LookupError, ValueError, TypeError, AttributeError or ArithmeticError if the object lacks a field that every object
    of its kind has, or if a field has another type or a time that Python cannot represent.
    """
    builders: dict[ObjectKind, Callable[[KubeObject], ObjectRecord]] = {
        RAY_JOB: _job,
        RAY_CLUSTER: _cluster,
        POD: _pod,
        CONFIG_MAP: _config_map,
    }
    return builders[kind](raw) if kind in builders else Child(**_child(kind.name, raw))


def training_of(raw: KubeObject) -> str:
    """Return the name of the training that an object belongs to, from its label; empty if it has no such label."""
    return shared(str(raw["metadata"].get("labels", {}).get(object_names.TRAINING, "")))


def _child(kind: str, raw: KubeObject) -> dict[str, Any]:
    metadata = raw["metadata"]
    owner = next((reference for reference in metadata.get("ownerReferences", ()) if reference.get("controller")), None)
    return {
        "kind": kind,
        "name": metadata["name"],
        "namespace": shared(metadata["namespace"]),
        "uid": metadata["uid"],
        "version": metadata["resourceVersion"],
        "owner": None if owner is None else owner["uid"][:MAX_UID_CHARACTERS],
        "hash": _annotation(raw, object_names.HASH)[:MAX_HASH_CHARACTERS] or None,
        "deleting": _time(metadata.get("deletionTimestamp")),
    }


def _config_map(raw: KubeObject) -> Child:
    name, data = str(raw["metadata"]["name"]), raw.get("data") or {}
    for suffix, key in (("-progress", PROGRESS_KEY), ("-control", CONTROL_KEY)):
        if name.endswith(suffix):
            written = _last_written(raw, key)
            return MessageConfigMap(**_child(CONFIG_MAP.name, raw), text=_bounded(data.get(key)), written=written)
    return Child(**_child(CONFIG_MAP.name, raw))


def _last_written(raw: KubeObject, key: str) -> datetime | None:
    """Return when the field `key` of a ConfigMap's `data` was last written; None if managedFields does not contain the time.

    Users who may patch the ConfigMap, as the trainer may, can also write managedFields, with times that Python cannot
    represent.
    """
    times = []
    for entry in raw["metadata"].get("managedFields", ()):
        if _owns(entry, key) and entry.get("time"):
            with suppress(ValueError):
                times.append(parse_time(entry["time"]))
    return max(times, default=None)


def _annotation(raw: KubeObject, name: str) -> str:
    """Return the value of an annotation; empty if the object does not have it."""
    value: str = raw["metadata"].get("annotations", {}).get(name, "")
    return value


def _bounded(text: str | None) -> bytes | None:
    return None if text is None else text[: MAX_MESSAGE_BYTES + 1].encode()[: MAX_MESSAGE_BYTES + 1]


def _owns(entry: Mapping[str, Any], key: str) -> bool:
    """Return whether an entry of managedFields contains the field `key` of a ConfigMap's `data`."""
    return f"f:{key}" in entry.get("fieldsV1", {}).get("f:data", {})


def _job(raw: KubeObject) -> RayJob:
    metadata, status = raw["metadata"], raw.get("status") or {}
    return RayJob(
        **_child(RAY_JOB.name, raw),
        training=training_of(raw),
        attempt=_attempt_of_job(raw),
        spec_hash=_annotation(raw, object_names.SPEC_HASH)[:MAX_HASH_CHARACTERS],
        created=parse_time(metadata["creationTimestamp"]),
        suspended=bool(raw.get("spec", {}).get("suspend")),
        deployment=shared(status.get("jobDeploymentStatus", "")[:MAX_STATE_CHARACTERS]),
        status=shared(status.get("jobStatus", "")[:MAX_STATE_CHARACTERS]),
        reason=status.get("reason", "")[:MAX_MESSAGE_CHARACTERS],
        message=status.get("message", "")[:MAX_JOB_MESSAGE_CHARACTERS],
        cluster=status.get("rayClusterName", "")[:MAX_NAME_CHARACTERS],
        queued=QUEUE_LABEL in metadata.get("labels", {}),
        rollout_nodes=_rollout_nodes(raw),
        image=_image(raw),
        image_reference=shared(_annotation(raw, object_names.IMAGE)[:MAX_IMAGE_CHARACTERS]),
        ray_version=shared(_ray_version(raw)),
        update_request=_annotation(raw, object_names.UPDATE)[:MAX_REQUEST_CHARACTERS],
    )


def _ray_version(raw: KubeObject) -> str:
    version = (raw.get("spec", {}).get("rayClusterSpec") or {}).get("rayVersion")
    return str(version or "")[:MAX_VERSION_CHARACTERS]


def _image(raw: KubeObject) -> str:
    """Return the image of Ray's container in the head group of a RayJob; empty if there is none."""
    head = (raw.get("spec", {}).get("rayClusterSpec") or {}).get("headGroupSpec") or {}
    containers = head.get("template", {}).get("spec", {}).get("containers", ())
    images = (str(each.get("image", "")) for each in containers if each.get("name") == RAY_CONTAINER)
    return shared(next(images, "")[:MAX_IMAGE_CHARACTERS])


def _rollout_nodes(raw: KubeObject) -> int:
    groups = (raw.get("spec", {}).get("rayClusterSpec") or {}).get("workerGroupSpecs", ())
    rollout = (object_names.ROLLOUT, object_names.LANE_GROUP)
    return sum(int(group.get("replicas", 0)) for group in groups if group.get("groupName") in rollout)


def _cluster(raw: KubeObject) -> RayCluster:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    failures = [
        condition.get("message", "")
        for condition in status.get("conditions", ())
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
    ]
    return RayCluster(
        **_child(RAY_CLUSTER.name, raw),
        training=training_of(raw),
        attempt=_attempt(raw),
        created=parse_time(raw["metadata"]["creationTimestamp"]),
        state=shared(status.get("state", "")[:MAX_STATE_CHARACTERS]),
        failure="; ".join(failures)[:MAX_MESSAGE_CHARACTERS],
        groups=tuple(_group(group) for group in spec.get("workerGroupSpecs", ())[:MAX_GROUPS]),
        autoscaled=bool(spec.get("enableInTreeAutoscaling")),
    )


def _group(raw: Mapping[str, Any]) -> WorkerGroup:
    leaving: Sequence[str] = (raw.get("scaleStrategy") or {}).get("workersToDelete", ())
    return WorkerGroup(
        name=shared(raw["groupName"][:MAX_NAME_CHARACTERS]),
        replicas=raw.get("replicas", 0),
        min_replicas=raw.get("minReplicas", 0),
        max_replicas=raw.get("maxReplicas", 0),
        leaving=tuple(name[:MAX_NAME_CHARACTERS] for name in leaving[:MAX_LEAVING]),
    )


def _pod(raw: KubeObject) -> Pod:
    metadata, status = raw["metadata"], raw.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    deleting = _deletion_requested(metadata)
    init_containers = raw.get("spec", {}).get("initContainers") or ()
    native_sidecars = {each.get("name") for each in init_containers if each.get("restartPolicy") == "Always"}
    reason, code, message = _fault(status, conditions, native_sidecars, deleting)
    return Pod(
        name=metadata["name"],
        namespace=shared(metadata["namespace"]),
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        training=training_of(raw),
        attempt=_attempt(raw),
        pool=POOLS[metadata.get("labels", {}).get(object_names.POOL, "head")],
        lane=metadata.get("labels", {}).get(object_names.LANE) == "true",
        phase=shared(status.get("phase", "")),
        ready=conditions.get("Ready", {}).get("status") == "True",
        created=parse_time(metadata["creationTimestamp"]),
        deleting=deleting,
        reason=shared(reason[:MAX_STATE_CHARACTERS]),
        exit_code=code,
        message=message[:MAX_MESSAGE_CHARACTERS],
        image_id=_image_id(status),
        node=shared((raw.get("spec", {}).get("nodeName") or "")[:MAX_NAME_CHARACTERS]),
        ended=_ended(status),
        cluster=shared(_cluster_of_pod(metadata)),
        unready_since=_unready_since(conditions),
    )


def _unready_since(conditions: Mapping[str, Mapping[str, Any]]) -> datetime | None:
    """Return the later of the times at which a pod got its node and became not ready; None if neither is known."""
    states = (("PodScheduled", "True"), ("Ready", "False"))
    changed = (conditions[kind] for kind, status in states if conditions.get(kind, {}).get("status") == status)
    times = (condition.get("lastTransitionTime") for condition in changed)
    return max((parse_time(time) for time in times if time), default=None)


def _image_id(status: Mapping[str, Any]) -> str:
    containers = status.get("containerStatuses", ())
    ids = (str(each.get("imageID") or "") for each in containers if each.get("name") == RAY_CONTAINER)
    return shared(next(ids, "")[:MAX_IMAGE_ID_CHARACTERS])


def _ended(status: Mapping[str, Any]) -> bool:
    """Return whether all containers of a pod have ended for good, as its kubelet reports."""
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    states = [container.get("state") or {} for container in status.get("containerStatuses", ())]
    return bool(states) and all("terminated" in state for state in states)


def _cluster_of_pod(metadata: Mapping[str, Any]) -> str:
    owners = metadata.get("ownerReferences", ())
    controllers = (owner for owner in owners if owner.get("controller") and owner.get("kind") == RAY_CLUSTER.name)
    return next((owner["name"][:MAX_NAME_CHARACTERS] for owner in controllers), "")


def _deletion_requested(metadata: Mapping[str, Any]) -> datetime | None:
    """Return when a pod's deletion was requested; None if the pod is not being deleted.

    deletionTimestamp is the end of the grace period, so the period is subtracted.
    """
    if (grace_end := _time(metadata.get("deletionTimestamp"))) is None:
        return None
    return grace_end - _grace(metadata.get("deletionGracePeriodSeconds") or 0)


def _grace(seconds: int) -> timedelta:
    """Return the time between the request to delete a pod and its deletionTimestamp. seconds: its grace period.

    Users choose the grace period, which may be billions of years. The API server counts it in nanoseconds, as a signed
    number of 64 bits that wraps (registry/rest/delete.go). The result wraps alike, so it is at most 293 years.
    """
    nanoseconds = (seconds * 10**9 + 2**63) % 2**64 - 2**63
    return timedelta(microseconds=nanoseconds // 1000)


def _fault(
    status: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    native_sidecars: Container[str],
    deleting: datetime | None,
) -> tuple[str, int | None, str]:
    """Return the reason, exit code and message of a pod that does not work; an empty reason if the pod has no fault.

    The exit code is None unless a container has ended. native_sidecars: names of the init containers with restartPolicy
    Always, which run as long as the containers, and which the kubelet starts again when they end. deleting: when the pod's deletion was requested, or None.
    Disruptions are checked first, then containers, then scheduling. A container that ended after the pod's deletion was
    requested does not count, because the deletion ended it. A container that ended earlier does count: KubeRay deletes
    a pod because its container has ended, and only the last state of the pod shows why. A sidecar that ended has a reason of its
    own, because the trainer does not depend on it.
    """
    disruption = conditions.get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        return DISRUPTION_REASONS.get(disruption.get("reason", ""), "Evicted"), None, disruption.get("message", "")
    if status.get("reason") in POD_STATUS_REASONS:
        return POD_STATUS_REASONS[status["reason"]], None, status.get("message", "")
    containers = status.get("containerStatuses", ())
    ray = [container for container in containers if container.get("name") == RAY_CONTAINER]
    first = status.get("initContainerStatuses", ())
    sidecars = [container for container in containers if container.get("name") != RAY_CONTAINER]
    sidecars += [container for container in first if container.get("name") in native_sidecars]
    for container in (*ray, *(each for each in first if each not in sidecars), *sidecars):
        state = container.get("state") or {}
        terminated = state.get("terminated") or {}
        if terminated.get("exitCode", 0) != 0 and not _is_after(terminated.get("finishedAt"), deleting):
            reason = "OOMKilled" if terminated.get("reason") == "OOMKilled" else "Error"
            code = terminated["exitCode"]
            message = terminated.get("message", "") or f"exit code {code}"
            if container in sidecars:
                return SIDECAR_FAILED, code, f"container {container.get('name')}: {reason}: {message}"
            return reason, code, message
        if (waiting := state.get("waiting")) is not None and waiting.get("reason", "") not in ("", *STARTING_REASONS):
            return waiting["reason"], None, waiting.get("message", "")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return scheduled.get("reason", "Unschedulable"), None, scheduled.get("message", "")
    if status.get("phase") == "Failed" and deleting is None:
        return "Error", None, status.get("message", "")
    return "", None, ""


def _is_after(text: str | None, deleting: datetime | None) -> bool:
    return text is not None and deleting is not None and parse_time(text) > deleting


def _attempt(raw: KubeObject) -> int:
    return int(raw["metadata"].get("labels", {}).get(object_names.ATTEMPT, 0))


def _attempt_of_job(raw: KubeObject) -> int:
    """Return the number of a RayJob's attempt: from its name, because somebody may have changed the label."""
    number = raw["metadata"]["name"].rpartition("-")[2]
    return int(number) if number.isdecimal() else _attempt(raw)


def _time(text: str | None) -> datetime | None:
    return None if text is None else parse_time(text)
