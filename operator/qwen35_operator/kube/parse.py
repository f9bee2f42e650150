"""From raw objects to the small records that decisions read. The raw ones are forgotten at once: there are thousands."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from qwen35_operator.desired import names
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_CLUSTER, RAY_JOB, Kind
from qwen35_operator.reconcile.observed import Child, Pod, Pool, RayCluster, RayJob, Reported, WorkerGroup
from qwen35_operator.status.times import parse as time
from qwen35_trainer.contract import ContractError, Control, parse_control, parse_progress
from qwen35_trainer.contract.names import CONTROL_KEY, PROGRESS_KEY

type Raw = Mapping[str, Any]

CONTAINER: Final = "ray"
LONGEST = 512
"""Characters of a pod's message that are kept."""
POOLS: Final[Mapping[str, Pool]] = {"head": "head", "rollout": "rollout", "train": "train"}
DISRUPTIONS: Final = {
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
}
"""Reasons of the condition DisruptionTarget."""
GIVEN_UP: Final = {"Evicted": "Evicted", "NodeLost": "NodeLost", "Preempting": "Preempted", "NodeShutdown": "NodeLost"}
"""status.reason of a pod that its node gave up."""
STARTING: Final = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, slots=True)
class Message(Child):
    """`-progress` or `-control`, as its text; None while the key is not there."""

    text: str | None
    written: datetime | None
    """When the API server last saw the text change."""


type Record = Child | Pod


def record(kind: Kind, raw: Raw) -> Record:
    """The record of an object. Raises KeyError or ValueError for one that has not what its kind always has."""
    builders: dict[Kind, Callable[[Raw], Record]] = {RAY_JOB: _job, RAY_CLUSTER: _cluster, POD: _pod}
    if kind == CONFIG_MAP:
        return _config_map(raw)
    return builders[kind](raw) if kind in builders else Child(**_child(kind.name, raw))


def training_of(raw: Raw) -> str:
    """The training that an object belongs to, by its label."""
    return sys.intern(str(raw["metadata"].get("labels", {}).get(names.TRAINING, "")))


def reported(message: Message) -> Reported | None:
    """`-progress`, read; None while it is empty."""
    if not message.text:
        return None
    try:
        return Reported(parse_progress(message.text), None, message.written)
    except ContractError as error:
        return Reported(None, str(error), message.written)


def control(message: Message) -> Control | None:
    """`-control`, read. What cannot be read is nobody's order: it will be written anew."""
    if not message.text:
        return None
    try:
        return parse_control(message.text)
    except ContractError:
        return None


def _child(kind: str, raw: Raw) -> dict[str, Any]:
    about = raw["metadata"]
    owner = next((one for one in about.get("ownerReferences", ()) if one.get("controller")), None)
    return {
        "kind": kind,
        "name": about["name"],
        "namespace": sys.intern(about["namespace"]),
        "uid": about["uid"],
        "version": about["resourceVersion"],
        "owner": None if owner is None else owner["uid"],
        "hash": about.get("annotations", {}).get(names.HASH),
        "deleting": _time(about.get("deletionTimestamp")),
    }


def _config_map(raw: Raw) -> Child:
    name, data = str(raw["metadata"]["name"]), raw.get("data") or {}
    for suffix, key in (("-progress", PROGRESS_KEY), ("-control", CONTROL_KEY)):
        if name.endswith(suffix):
            times = [entry.get("time") for entry in raw["metadata"].get("managedFields", ()) if _owns(entry, key)]
            written = max((time(one) for one in times if one), default=None)
            return Message(**_child(CONFIG_MAP.name, raw), text=data.get(key), written=written)
    return Child(**_child(CONFIG_MAP.name, raw))


def _owns(entry: Raw, key: str) -> bool:
    return f"f:{key}" in entry.get("fieldsV1", {}).get("f:data", {})


def _job(raw: Raw) -> RayJob:
    about, status = raw["metadata"], raw.get("status") or {}
    return RayJob(
        **_child(RAY_JOB.name, raw),
        training=training_of(raw),
        attempt=_attempt(raw),
        spec_hash=about.get("annotations", {}).get(names.SPEC_HASH, ""),
        created=time(about["creationTimestamp"]),
        suspended=bool(raw.get("spec", {}).get("suspend")),
        deployment=sys.intern(status.get("jobDeploymentStatus", "")),
        status=sys.intern(status.get("jobStatus", "")),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        cluster=status.get("rayClusterName", ""),
    )


def _cluster(raw: Raw) -> RayCluster:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    broken = [
        one.get("message", "")
        for one in status.get("conditions", ())
        if one.get("type") == "ReplicaFailure" and one.get("status") == "True"
    ]
    return RayCluster(
        **_child(RAY_CLUSTER.name, raw),
        training=training_of(raw),
        attempt=_attempt(raw),
        created=time(raw["metadata"]["creationTimestamp"]),
        state=sys.intern(status.get("state", "")),
        failure="; ".join(broken)[:LONGEST],
        groups=tuple(_group(group) for group in spec.get("workerGroupSpecs", ())),
        autoscaled=bool(spec.get("enableInTreeAutoscaling")),
    )


def _group(raw: Raw) -> WorkerGroup:
    return WorkerGroup(
        name=sys.intern(raw["groupName"]),
        replicas=raw.get("replicas", 0),
        least=raw.get("minReplicas", 0),
        most=raw.get("maxReplicas", 0),
        leaving=tuple((raw.get("scaleStrategy") or {}).get("workersToDelete", ())),
    )


def _pod(raw: Raw) -> Pod:
    about, status = raw["metadata"], raw.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    deleting = _asked_to_go(about)
    reason, code, message = _fault(status, conditions, deleting)
    return Pod(
        name=about["name"],
        namespace=sys.intern(about["namespace"]),
        uid=about["uid"],
        version=about["resourceVersion"],
        training=training_of(raw),
        attempt=_attempt(raw),
        pool=POOLS[about.get("labels", {}).get(names.POOL, "head")],
        phase=sys.intern(status.get("phase", "")),
        ready=conditions.get("Ready", {}).get("status") == "True",
        created=time(about["creationTimestamp"]),
        deleting=deleting,
        reason=sys.intern(reason),
        exit_code=code,
        message=message[:LONGEST],
    )


def _asked_to_go(about: Raw) -> datetime | None:
    """When a pod's deletion was asked for: the timestamp is when its grace is over."""
    if (over := _time(about.get("deletionTimestamp"))) is None:
        return None
    return over - timedelta(seconds=about.get("deletionGracePeriodSeconds") or 0)


def _fault(status: Raw, conditions: Mapping[str, Raw], deleting: datetime | None) -> tuple[str, int | None, str]:
    """Why a pod does not work: what the cluster did to it, then what its containers say, then the scheduler.

    A container that ended after the pod was asked to go has ended as asked. One that ended before is why it was asked:
    KubeRay deletes such a pod at once, and its last state is all that remains to tell of it.
    """
    target = conditions.get("DisruptionTarget", {})
    if target.get("status") == "True":
        return DISRUPTIONS.get(target.get("reason", ""), "Evicted"), None, target.get("message", "")
    if status.get("reason") in GIVEN_UP:
        return GIVEN_UP[status["reason"]], None, status.get("message", "")
    containers = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    for container in sorted(containers, key=lambda one: one.get("name") != CONTAINER):
        state = container.get("state") or {}
        ended = state.get("terminated") or {}
        if ended.get("exitCode", 0) != 0 and not _after(ended.get("finishedAt"), deleting):
            reason = "OOMKilled" if ended.get("reason") == "OOMKilled" else "Error"
            return reason, ended["exitCode"], ended.get("message", "") or f"exit code {ended['exitCode']}"
        if (waits := state.get("waiting")) is not None and waits.get("reason", "") not in ("", *STARTING):
            return waits["reason"], None, waits.get("message", "")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return scheduled.get("reason", "Unschedulable"), None, scheduled.get("message", "")
    if status.get("phase") == "Failed" and deleting is None:
        return "Error", None, status.get("message", "")
    return "", None, ""


def _after(text: str | None, deleting: datetime | None) -> bool:
    return text is not None and deleting is not None and time(text) > deleting


def _attempt(raw: Raw) -> int:
    return int(raw["metadata"].get("labels", {}).get(names.ATTEMPT, 0))


def _time(text: str | None) -> datetime | None:
    return None if text is None else time(text)
