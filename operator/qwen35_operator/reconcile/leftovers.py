"""Finds what is left of earlier attempts and holds up the next one, because it may still write to its folders.

    RayJob               until it has ended or its deletion was requested: a queue could admit it, and it would start pods
    RayCluster           until it is gone
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

LOST_POD_SECONDS = 120.0
"""Time after the request to delete a pod from which the pod counts as lost. A live kubelet confirms its end earlier."""
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

    def __bool__(self) -> bool:
        return bool(self.jobs or self.clusters or self.pods)

    def __str__(self) -> str:
        names = [f"RayJob {name}" for name in self.jobs] + [f"RayCluster {name}" for name in self.clusters]
        names += [f"pod {pod.name}" for pod in self.pods]
        return ", ".join(names[:MAX_NAMED])


def leftovers(observed: Observed, number: int, now: datetime) -> Leftovers:
    """Return the RayJobs, clusters and pods that hold up the attempt `number`.

    If the user has forced the start of this attempt, only RayJobs and RayClusters whose deletion was not requested hold
    it up.
    """
    closed = {attempt.number for attempt in observed.status.attempts if attempt.outcome != "Running"}
    jobs = tuple(job.name for job in observed.jobs if job.attempt in closed and not job.ended and job.deleting is None)
    if is_forced(observed, number):
        return Leftovers(jobs, tuple(cluster.name for cluster in observed.clusters if cluster.deleting is None), (), ())
    pods = tuple(pod for pod in observed.pods if _may_run(pod, observed, now))
    lost = tuple(pod for pod in pods if _deleted_for(pod, now) >= LOST_POD_SECONDS)
    return Leftovers(jobs, tuple(cluster.name for cluster in observed.clusters), pods, lost)


def is_forced(observed: Observed, number: int) -> bool:
    """Return whether the user has confirmed that no pod of an attempt before this number runs.

    A confirmation is valid for one attempt.
    """
    return observed.force_start == str(number)


def nodes_to_read(status: TrainingStatus, pods: Sequence[Pod], now: datetime) -> tuple[str, ...]:
    """Return the names of the Kubernetes nodes whose state may prove that pods of an earlier attempt have ended."""
    if status.attempts and status.attempts[-1].outcome == "Running":
        return ()
    waiting = (pod for pod in pods if _writes(pod) and not pod.ended and _deleted_for(pod, now) >= READ_NODE_SECONDS)
    return tuple(sorted({pod.node for pod in waiting if pod.node}))


def explanation(observed: Observed, lost: Sequence[Pod], number: int) -> str:
    """Return a message about the pods that the attempt `number` waits for, and what a person can do.

    lost: pods whose end nobody has confirmed.
    """
    named = ", ".join(f"{pod.name} on node {pod.node or 'none'}" for pod in lost[:MAX_NAMED])
    more = f" and {len(lost) - MAX_NAMED} others" if len(lost) > MAX_NAMED else ""
    readable = all(observed.nodes.get(pod.node) != "Unreadable" for pod in lost)
    ways = "when its kubelet answers, or when the node is deleted"
    ways += (
        " or has the taint node.kubernetes.io/out-of-service" if readable else " (the operator may not read nodes here)"
    )
    return (
        f"attempt {number} waits for pods that may still run and write: {named}{more}. Their deletion was requested, and nobody has "
        f"confirmed their end. The attempt starts {ways}. If you know that they do not run any more: kubectl annotate "
        f"qwen35training/{observed.name} -n {observed.namespace} {object_names.FORCE_START}={number} --overwrite"
    )


def _may_run(pod: Pod, observed: Observed, now: datetime) -> bool:
    if pod.ended or observed.nodes.get(pod.node) in ("Gone", "OutOfService"):
        return False
    return _writes(pod) or _deleted_for(pod, now) < LOST_POD_SECONDS


def _writes(pod: Pod) -> bool:
    """Return whether a pod can write to the folders of the training. Rollout pods only generate."""
    return pod.pool != object_names.ROLLOUT


def _deleted_for(pod: Pod, now: datetime) -> float:
    """Return the seconds since the deletion of a pod was requested; a negative number if it is not being deleted."""
    return -1.0 if pod.deleting is None else (now - pod.deleting).total_seconds()
