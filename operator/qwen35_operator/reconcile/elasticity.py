"""Chooses the target size of the rollout pool, and returns the writes that give a running cluster this size.

    spec.rollout.nodes, which `kubectl scale` writes too ─┐
    autoscaling's choice ─────────────────────────────────┴─► target ──► ConfigMap NAME-control ──► RayCluster replicas, idlest pods
                                                                           └── shrinking: leaving ──► trainer: drained ─┘   deleted first

Pods leave in two steps: the trainer gives their replicas no more sequences, and the pods are removed when it reports that they are
drained, or after async.stallSeconds.

KubeRay submits the trainer only when all pods of the cluster work. If some rollout pods have no node after
START_WAIT_SECONDS, or a node on which they do not work after STUCK_SECONDS, and at least rollout.minNodes others work, these pods are
removed. The pool grows again when the trainer runs.

A RayJob ignores later edits of its cluster spec, so the operator patches the RayCluster itself. The operator does not
change the size if Ray's autoscaler decides it. Under a queue, the rollout pool never gets more nodes than the RayJob
requests, because the queue has admitted only these. This holds for Kueue's elastic jobs too: Kueue reads the size of a
RayCluster only if Ray's autoscaler scales it (pkg/controller/jobs/raycluster/common.go, UpdatePodSets), so no quota
would include the further nodes.

The nodes of the straggler lane (whose replicas finish long sequences) are a worker group of their own, which keeps its
size. All sizes here include them, except the number of replicas of the worker group `rollout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import AutoscaleStatus, TrainingStatus
from qwen35_operator.desired.object_names import LANE_GROUP
from qwen35_operator.kube.object_records import Pod, RayCluster
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.reconcile.writes import ClusterWrite, PostEvent, Scale
from qwen35_operator.status.times import rfc3339, seconds_since

ROLLOUT_GROUP = "rollout"
START_WAIT_SECONDS = 300.0
"""Time for which an attempt waits for all nodes of its rollout pool, if fewer are enough. Autoscalers mostly add a node within it."""
STUCK_SECONDS = 1800.0
"""Time for which an attempt waits for a rollout pod that has a node, if fewer are enough: a node may pull an image of 20 GB for minutes,
and one with a full disk never does."""
MISSING = f"the others have no node after {START_WAIT_SECONDS:g} s, or do not work after {STUCK_SECONDS:g} s"
MAX_NAMED_PODS = 5
"""Maximum number of pods that an event names."""


@dataclass(frozen=True)
class Resize:
    """The target size of the rollout pool in nodes, and the writes that bring a running cluster to this size."""

    nodes: int
    leaving: tuple[str, ...] = ()
    """Names of the pods that are removed next. The trainer gives the replicas in these pods no new sequences."""
    leaving_since: float | None = None
    """Unix time since which all of the leaving pods have been named to the trainer; None if no pod leaves."""
    writes: tuple[ClusterWrite, ...] = ()
    held: str | None = None
    """Why the running cluster must keep a size other than the target; None if nothing prevents the change."""
    after: float | None = None
    """Seconds after which the size may change although nothing else does; None if only an event can change it."""


def target(training: TrainingResource, status: TrainingStatus) -> int:
    """Return the number of nodes that the rollout pool should have; 0 if the mode has no separate rollout pool."""
    pool = training.spec.rollout
    if pool is None or training.spec.mode != "FullyAsync":
        return 0
    if (choice := autoscale_choice(training, status)) is None:
        return pool.nodes
    return min(max(choice.nodes, training.spec.min_rollout_nodes), pool.maxNodes or pool.nodes)


def autoscale_choice(training: TrainingResource, status: TrainingStatus) -> AutoscaleStatus | None:
    """Return the size that autoscaling has chosen for the rollout pool.

    Returns None if autoscaling is off, or has chosen no size since spec.rollout.nodes was edited.
    """
    pool, choice = training.spec.rollout, status.autoscale
    if pool is None or pool.autoscale is None or choice is None:
        return None
    return choice if choice.specNodes in (None, pool.nodes) else None


def resize(situation: AttemptSituation, nodes: int) -> Resize:
    """Return the writes that give the attempt's cluster this number of rollout nodes.

    There are no writes if the cluster already has this number, must keep another number (`Resize.held` says why), waits
    for pods that drain, or does not exist. If the queue has admitted fewer nodes, the cluster gets only the admitted
    number.
    """
    cluster, pool = situation.cluster, situation.spec.rollout
    if cluster is None or cluster.deleting is not None or pool is None or nodes == 0:
        return Resize(nodes)
    groups = ((index, group) for index, group in enumerate(cluster.groups) if group.name == ROLLOUT_GROUP)
    index, group = next(groups, (0, None))
    if group is None:
        return Resize(nodes)
    # As the cluster was created: attempts of an earlier operator have no such group.
    lane = sum(other.replicas for other in cluster.groups if other.name == LANE_GROUP)
    present = group.replicas + lane
    limit, held = _admitted_nodes(situation), None
    if limit is not None and nodes > limit:
        held = f"the queue admitted {limit} rollout nodes to this attempt; the next attempt requests {nodes}"
        nodes = limit
    if cluster.autoscaled and present != nodes:
        message = f"Ray's autoscaler decides the size of this cluster; it has {present} nodes, and {nodes} with the next attempt"
        return Resize(nodes, held=message)
    size, wait = _size_at_start(situation, cluster, nodes, present)
    if present == size:
        existing = {pod.name for pod in situation.observed.pods}
        leaving = tuple(name for name in group.leaving if name in existing)
        return Resize(nodes, leaving, _leaving_since(situation, leaving), held=held, after=wait)
    leaving = _pods_to_delete(situation, present - size)
    since = _leaving_since(situation, leaving)
    if (drain := _drain_seconds(situation, leaving, since)) > 0:
        events = _draining(situation, leaving) if since == situation.now.timestamp() else ()
        return Resize(nodes, leaving, since, events, held, after=drain)
    scale = Scale(
        cluster=cluster.name,
        uid=cluster.uid,
        index=index,
        group=ROLLOUT_GROUP,
        current_replicas=group.replicas,
        replicas=size - lane,
        min_replicas=min(situation.spec.min_rollout_nodes, size) - lane,
        max_replicas=max(pool.maxNodes or pool.nodes, nodes) - lane,
        pods_to_delete=leaving,
    )
    why = "" if size == nodes else f": {MISSING}"
    event = PostEvent("Normal", "Scaled", f"rollout nodes {present} → {size}{why}")
    return Resize(nodes, leaving, since, (scale, event), held)


def autoscaled(situation: AttemptSituation) -> AutoscaleStatus | None:
    """Return the next size of the rollout pool, one step larger or smaller, or None to keep its size.

    The choice depends on the shares of time in which the pools are idle, according to the trainer's report. A step is
    the number of nodes that one replica needs, and at least one node.
    """
    pool, report = situation.spec.rollout, situation.report
    if pool is None or pool.autoscale is None or report is None or report.state != "Running":
        return None
    if report.trainIdle is None or report.rolloutIdle is None:
        return None
    if not _is_settled(situation, pool.autoscale.stabilizationSeconds):
        return None
    rule, nodes = pool.autoscale, target(situation.training, situation.status)
    step = situation.spec.nodes_of_replica(lane=False)
    shares = f"train idle {report.trainIdle:.0%}, rollout idle {report.rolloutIdle:.0%}"
    if report.trainIdle > rule.growAboveTrainIdle and report.rolloutIdle <= rule.shrinkAboveRolloutIdle:
        chosen, why = nodes + step, f"the train pool waits for rollouts: {shares}"
    elif report.rolloutIdle > rule.shrinkAboveRolloutIdle and report.trainIdle <= rule.growAboveTrainIdle:
        chosen, why = nodes - step, f"the rollout pool has too little to do: {shares}"
    else:
        return None
    most, admitted = pool.maxNodes or pool.nodes, _admitted_nodes(situation)
    if not situation.spec.min_rollout_nodes <= chosen <= (most if admitted is None else min(most, admitted)):
        return None
    reason = f"{nodes} → {chosen}: {why}"
    return AutoscaleStatus(nodes=chosen, specNodes=pool.nodes, reason=reason, time=rfc3339(situation.now))


def _is_settled(situation: AttemptSituation, stabilization_seconds: float) -> bool:
    """Return whether all nodes of the rollout pool work, and the pool has had its present size for long enough.

    stabilization_seconds: minimum time since the start of the attempt and since the last choice of a size.
    """
    status, attempt = situation.status, situation.attempt
    ready = [pod for pod in situation.pods if pod.pool == ROLLOUT_GROUP and pod.ready]
    times = [attempt.startTime or "", *([status.autoscale.time] if status.autoscale else [])]
    unchanged = min(seconds_since(time, situation.now) for time in times if time)
    return len(ready) == target(situation.training, status) and unchanged >= stabilization_seconds


def _admitted_nodes(situation: AttemptSituation) -> int | None:
    """Return the number of rollout nodes that the attempt's queue has admitted; None if the attempt has no queue."""
    job = situation.job
    return job.rollout_nodes if job is not None and job.queued else None


def _size_at_start(
    situation: AttemptSituation, cluster: RayCluster, nodes: int, present: int
) -> tuple[int, float | None]:
    """Return the number of rollout nodes that the cluster should have now, and the seconds until fewer may be enough.

    This is `nodes`, unless KubeRay waits for pods before it submits the trainer, and rollout.minNodes pods work. Then the
    cluster does not grow, and it loses the pods that do not work in time, and those that are not enough for one more
    replica of several nodes. The seconds are None if no such pod waits.
    present: the cluster's number of rollout nodes.
    """
    job, least, now = situation.job, situation.spec.min_rollout_nodes, situation.now
    if job is None or job.deployment not in ("", "Initializing") or nodes <= least or present > nodes:
        return nodes, None
    must_work = [pod for pod in situation.pods if pod.pool != ROLLOUT_GROUP or pod.lane]
    others = sum(pod.pool != ROLLOUT_GROUP for pod in must_work)
    working = sum(pod.ready for pod in situation.pods if pod.pool == ROLLOUT_GROUP)
    if others < 1 + situation.spec.train.nodes or not all(pod.ready for pod in must_work):
        return present, None
    working -= (working - situation.spec.lane_nodes) % situation.spec.nodes_of_replica(lane=False)
    if working < least or working == present:
        return present, None
    given_up = [_given_up(pod) for pod in situation.pods if not pod.ready]
    wait = max(given_up, default=cluster.created + timedelta(seconds=START_WAIT_SECONDS)) - now
    return (present, wait.total_seconds()) if wait > timedelta(0) else (working, None)


def _given_up(pod: Pod) -> datetime:
    """Return the time from which on the start of an attempt no longer waits for a rollout pod that is not ready."""
    if not pod.node:
        return pod.created + timedelta(seconds=START_WAIT_SECONDS)
    return (pod.unready_since or pod.created) + timedelta(seconds=STUCK_SECONDS)


def _leaving_since(situation: AttemptSituation, leaving: Sequence[str]) -> float | None:
    """Return the Unix time since which all of these pods have been named to the trainer: now, unless all were named before."""
    control = situation.observed.control
    if not leaving:
        return None
    if control is not None and control.attempt == situation.attempt.number and set(leaving) <= set(control.leaving):
        return situation.now.timestamp() if control.leavingSince is None else control.leavingSince
    return situation.now.timestamp()


def _drain_seconds(situation: AttemptSituation, leaving: Sequence[str], since: float | None) -> float:
    """Return for how many more seconds at most pods may drain before they are removed; 0 if they can be removed now.

    A pod without a replica has nothing to drain. Trainers of the first release do not report whether replicas are drained.
    """
    if since is None or situation.report is None:
        return 0.0
    pods = {pod for replica in situation.report.replicas if replica.drained is False for pod in replica.pods}
    if pods.isdisjoint(leaving):
        return 0.0
    return max(0.0, since + situation.spec.async_.stallSeconds - situation.now.timestamp())


def _draining(situation: AttemptSituation, leaving: Sequence[str]) -> tuple[PostEvent, ...]:
    named = ", ".join(leaving[:MAX_NAMED_PODS])
    more = f" and {len(leaving) - MAX_NAMED_PODS} others" if len(leaving) > MAX_NAMED_PODS else ""
    limit = situation.spec.async_.stallSeconds
    message = (
        f"{named}{more} will be removed when their replicas have finished their sequences, at most after {limit:g} s"
    )
    return (PostEvent("Normal", "Draining", message),)


def _pods_to_delete(situation: AttemptSituation, count: int) -> tuple[str, ...]:
    """Return the names of the `count` pods to delete when the pool shrinks; none if `count` is zero or negative.

    Pods that are already leaving come first, then pods that are not ready, then pods of no replica or of one that has lost
    a pod, then the pods of whole replicas, of which the idlest comes first. The pods of the straggler lane always stay.
    """
    if count <= 0:
        return ()
    control, report = situation.observed.control, situation.report
    current = control is not None and control.attempt == situation.attempt.number
    leaving = set(control.leaving) if control is not None and current else set()
    replicas = report.replicas if report else ()
    idle = {name: replica.idle for replica in replicas for name in replica.pods}
    first_pod = {
        name: first for replica in replicas for first in [min(replica.pods, default="")] for name in replica.pods
    }
    ready = {pod.name for pod in situation.pods if pod.ready}
    of_whole_replicas = {name for replica in replicas if ready.issuperset(replica.pods) for name in replica.pods}

    def order(pod: Pod) -> tuple[bool, bool, bool, float, str, str]:
        name, replica = pod.name, first_pod.get(pod.name, pod.name)
        return (name not in leaving, pod.ready, name in of_whole_replicas, -idle.get(name, 0.0), replica, name)

    pods = [pod for pod in situation.pods if pod.pool == ROLLOUT_GROUP and not pod.lane]
    return tuple(pod.name for pod in sorted(pods, key=order)[:count])
