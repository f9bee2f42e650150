"""Finds what is left of earlier attempts and holds up the next one, because it may still write to its folders.

    RayJob               until it has ended or its deletion was requested: a queue could admit it, and it would start pods
    RayCluster           until it is gone. One that no RayJob of the training owns, such as a copy that somebody has made, is
                         named after STRAY_CLUSTER_SECONDS, because only a person can know whether to delete it
    rollout pod          until it has ended, or LOST_POD_SECONDS after its deletion was requested: it writes nothing
    head pod, train pod  until there is a proof that it has ended:
                           its containers have ended, or the pod is gone from the API server
                           its node is gone, or has the taint node.kubernetes.io/out-of-service
                           the user confirms it by the annotation rl.qwen35.io/force-start: "<number of the attempt>"

A request to delete a pod proves nothing if the pod's node does not answer: its containers may run, and reach the storage
although they do not reach the API server. The trainer's fence (`qwen35_trainer/epoch.py`) would still keep the folders
intact, but both attempts would occupy devices, and only one would train.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.desired import object_names
from qwen35_operator.kube.object_records import Pod
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.status.times import parse as parse_time

LOST_POD_SECONDS = 120.0
"""Time after the request to delete a pod from which the pod counts as lost. A live kubelet confirms its end earlier."""
STRAY_CLUSTER_SECONDS = 120.0
"""Time after the end of the last attempt from which a RayCluster without a RayJob is reported. Those of attempts are gone
earlier."""
READ_NODE_SECONDS = 30.0
"""Time after the request to delete a pod from which the operator reads the pod's node: the usual grace period."""
JOB_SECONDS = 1.0
"""Time after which a start that waits for the deletion of a RayJob is tried again. The deletion is in the same decision."""
POLL_SECONDS = 30.0
"""Interval at which the operator reads the nodes of deleted pods again. The operator does not watch nodes."""
MAX_NAMED = 5
"""Maximum number of pods that a message names."""


@dataclass(frozen=True)
class Leftovers:
    """The RayJobs, clusters and pods of earlier attempts that hold up the next one."""

    jobs: tuple[str, ...]
    clusters: tuple[str, ...]
    pods: tuple[Pod, ...]
    lost: tuple[Pod, ...]
    """The pods among `pods` whose deletion was requested at least LOST_POD_SECONDS ago."""
    stray: tuple[str, ...] = ()
    """The clusters among `clusters` that no RayJob of the training owns and that nobody deletes."""

    def __bool__(self) -> bool:
        return bool(self.jobs or self.clusters or self.pods)

    def __str__(self) -> str:
        names = [f"RayJob {name}" for name in self.jobs] + [f"RayCluster {name}" for name in self.clusters]
        names += [f"pod {pod.name}" for pod in self.pods]
        return ", ".join(names[:MAX_NAMED])


def leftovers(observed: Observed, number: int, now: datetime) -> Leftovers:
    """Return the RayJobs, clusters and pods that hold up the attempt `number`.

    If the user has forced the start of this attempt, only RayJobs of the training and RayClusters of these RayJobs hold it
    up, unless their deletion was requested.
    """
    closed = {attempt.number for attempt in observed.status.attempts if attempt.outcome != "Running"}
    jobs = tuple(job.name for job in observed.jobs if job.attempt in closed and not job.ended and job.deleting is None)
    if is_forced(observed, number):
        owned = (cluster for cluster in observed.clusters if cluster.deleting is None and cluster.attempt)
        return Leftovers(jobs, tuple(cluster.name for cluster in owned), (), ())
    pods = tuple(pod for pod in observed.pods if _may_run(pod, observed, now))
    return Leftovers(
        jobs, tuple(cluster.name for cluster in observed.clusters), pods, _lost(pods, now), stray(observed, now)
    )


def unconfirmed(observed: Observed, now: datetime) -> tuple[Pod, ...]:
    """Return the pods whose deletion was requested at least LOST_POD_SECONDS ago, and whose end nobody has confirmed."""
    return _lost([pod for pod in observed.pods if not _has_ended(pod, observed)], now)


def seconds_until_lost(pods: Sequence[Pod], now: datetime) -> float | None:
    """Return the seconds until the first of the pods that are being deleted counts as lost; None if there is none."""
    waits = [LOST_POD_SECONDS - _deleted_for(pod, now) for pod in pods if pod.deleting is not None]
    return min((wait for wait in waits if wait > 0), default=None)


def _lost(pods: Sequence[Pod], now: datetime) -> tuple[Pod, ...]:
    return tuple(pod for pod in pods if _deleted_for(pod, now) >= LOST_POD_SECONDS)


def stray(observed: Observed, now: datetime) -> tuple[str, ...]:
    """Return the names of RayClusters that no RayJob of the training owns, and that nobody has begun to delete.

    Empty until STRAY_CLUSTER_SECONDS after the end of the last attempt: until then, Kubernetes may still delete the cluster of a
    deleted RayJob.
    """
    last = observed.status.attempts[-1] if observed.status.attempts else None
    ended = observed.created if last is None or last.endTime is None else parse_time(last.endTime)
    if (now - ended).total_seconds() < STRAY_CLUSTER_SECONDS:
        return ()
    unowned = (cluster for cluster in observed.clusters if cluster.attempt == 0 and cluster.deleting is None)
    return tuple(
        cluster.name for cluster in unowned if (now - cluster.created).total_seconds() >= STRAY_CLUSTER_SECONDS
    )


def is_forced(observed: Observed, number: int) -> bool:
    """Return whether the user has confirmed that nothing that still runs can disturb the attempt with this number.

    A confirmation is valid for one attempt.
    """
    return observed.force_start == str(number)


def nodes_to_read(status: TrainingStatus, pods: Sequence[Pod], now: datetime) -> tuple[str, ...]:
    """Return the names of the Kubernetes nodes whose state may prove that pods of an earlier attempt have ended."""
    if status.attempts and status.attempts[-1].outcome == "Running":
        return ()
    waiting = (pod for pod in pods if _writes(pod) and not pod.ended and _deleted_for(pod, now) >= READ_NODE_SECONDS)
    return tuple(sorted({pod.node for pod in waiting if pod.node}))


def explanation_while_stopped(lost: Sequence[Pod]) -> str:
    """Return a message about the pods that a suspension waits for, and what a person can do. lost: as `explanation` has them."""
    return (
        f"the training is suspended when its pods are gone: {_named(lost)}. Their deletion was requested, and nobody has confirmed "
        "their end. Repair the nodes, or delete them"
    )


def _named(pods: Sequence[Pod]) -> str:
    named = ", ".join(f"{pod.name} on node {pod.node or 'none'}" for pod in pods[:MAX_NAMED])
    return named + (f" and {len(pods) - MAX_NAMED} others" if len(pods) > MAX_NAMED else "")


def explanation(observed: Observed, lost: Sequence[Pod], number: int) -> str:
    """Return a message about the pods that the attempt `number` waits for, and what a person can do.

    lost: pods whose end nobody has confirmed.
    """
    readable = all(observed.nodes.get(pod.node) != "Unreadable" for pod in lost)
    ways = "when its kubelet answers, or when the node is deleted"
    ways += (
        " or has the taint node.kubernetes.io/out-of-service" if readable else " (the operator may not read nodes here)"
    )
    return (
        f"attempt {number} waits for pods that may still run and write: {_named(lost)}. Their deletion was requested, and nobody has "
        f"confirmed their end. The attempt starts {ways}. If you know that they do not run any more: "
        f"{_annotate(observed, number)}"
    )


def stray_explanation(observed: Observed, names: Sequence[str], number: int | None) -> str:
    """Return a message about RayClusters that no RayJob of the training owns, and what a person can do.

    names: of the RayClusters. number: number of the attempt that waits; None if the training is suspended.
    """
    shown = names[:MAX_NAMED]
    more = f" and {len(names) - MAX_NAMED} others" if len(names) > MAX_NAMED else ""
    waits = "the training is suspended when its clusters are gone" if number is None else f"attempt {number} waits"
    message = (
        f"{waits}: no RayJob of the training owns RayCluster {', '.join(shown)}{more}, but it has the training's label. If "
        f"nobody needs it: kubectl delete raycluster {' '.join(shown)} -n {observed.namespace}"
    )
    if number is None:
        return message
    return f"{message}. If it does not write to the training's folders: {_annotate(observed, number)}"


def _annotate(observed: Observed, number: int) -> str:
    """Return the command that forces the start of the attempt `number`."""
    return (
        f"kubectl annotate qwen35training/{observed.name} -n {observed.namespace} {object_names.FORCE_START}={number} "
        "--overwrite"
    )


def _may_run(pod: Pod, observed: Observed, now: datetime) -> bool:
    return not _has_ended(pod, observed) and (_writes(pod) or _deleted_for(pod, now) < LOST_POD_SECONDS)


def _has_ended(pod: Pod, observed: Observed) -> bool:
    return pod.ended or observed.nodes.get(pod.node) in ("Gone", "OutOfService")


def _writes(pod: Pod) -> bool:
    """Return whether a pod can write to the folders of the training. Rollout pods only generate."""
    return pod.pool != object_names.ROLLOUT


def _deleted_for(pod: Pod, now: datetime) -> float:
    """Return the seconds since the deletion of a pod was requested; a negative number if it is not being deleted."""
    return -1.0 if pod.deleting is None else (now - pod.deleting).total_seconds()
