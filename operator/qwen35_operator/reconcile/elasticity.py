"""Chooses the target size of the rollout pool, and returns the writes that give a running cluster this size.

    spec.rollout.nodes, or autoscaling's choice ──► target ──► ConfigMap NAME-control ──► RayCluster replicas, idlest pods deleted first

A RayJob ignores later edits of its cluster spec, so the operator patches the RayCluster itself. The operator does not
change the size if Ray's autoscaler decides it. Under a queue, the rollout pool never gets more nodes than the
RayJob requests, because the queue has admitted only these. This holds for Kueue's elastic jobs too: Kueue reads the
size of a RayCluster only if Ray's autoscaler scales it (pkg/controller/jobs/raycluster/common.go, UpdatePodSets), so
further nodes would be in no quota.

The nodes of the straggler lane are a worker group of their own, which keeps its size. All sizes here include them, except
the number of replicas of the worker group `rollout`.
"""

from dataclasses import dataclass

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import AutoscaleStatus, TrainingStatus
from qwen35_operator.desired.object_names import LANE_GROUP
from qwen35_operator.kube.object_records import Pod
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.reconcile.writes import ClusterWrite, PostEvent, Scale
from qwen35_operator.status.times import rfc3339, seconds_since

ROLLOUT_GROUP = "rollout"


@dataclass(frozen=True)
class Resize:
    """The target size of the rollout pool in nodes, and the writes that bring a running cluster to this size."""

    nodes: int
    leaving: tuple[str, ...] = ()
    """Names of the pods that are removed next. The trainer gives the replicas in these pods no new sequences."""
    writes: tuple[ClusterWrite, ...] = ()
    held: str | None = None
    """Why the running cluster must keep a size other than the target; None if nothing prevents the change."""


def target(training: TrainingResource, status: TrainingStatus) -> int:
    """Return the number of nodes that the rollout pool should have; 0 if the mode has no separate rollout pool."""
    pool = training.spec.rollout
    if pool is None or training.spec.mode != "FullyAsync":
        return 0
    if pool.autoscale is None or status.autoscale is None:
        return pool.nodes
    return min(max(status.autoscale.nodes, training.spec.min_rollout_nodes), pool.maxNodes or pool.nodes)


def resize(situation: AttemptSituation, nodes: int) -> Resize:
    """Return the writes that give the attempt's cluster this number of rollout nodes.

    There are no writes if the cluster already has this number, must keep another number (`Resize.held` says why), or
    does not exist. If the queue has admitted fewer nodes, the cluster gets only the admitted number.
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
    if present == nodes:
        existing = {pod.name for pod in situation.observed.pods}
        return Resize(nodes, tuple(name for name in group.leaving if name in existing), held=held)
    if cluster.autoscaled:
        message = f"Ray's autoscaler decides the size of this cluster; it has {present} nodes, and {nodes} with the next attempt"
        return Resize(nodes, held=message)
    leaving = _pods_to_delete(situation, present - nodes)
    scale = Scale(
        cluster=cluster.name,
        uid=cluster.uid,
        index=index,
        group=ROLLOUT_GROUP,
        current_replicas=group.replicas,
        replicas=nodes - lane,
        min_replicas=min(situation.spec.min_rollout_nodes, nodes) - lane,
        max_replicas=max(pool.maxNodes or pool.nodes, nodes) - lane,
        pods_to_delete=leaving,
    )
    event = PostEvent("Normal", "Scaled", f"rollout nodes {present} → {nodes}")
    return Resize(nodes, leaving, (scale, event), held)


def autoscaled(situation: AttemptSituation) -> AutoscaleStatus | None:
    """Return the next size of the rollout pool, one step larger or smaller, or None to keep its size.

    The choice depends on the shares of time in which the pools are idle, according to the trainer's report. A step is
    one node, or as many nodes as one replica needs.
    """
    pool, report = situation.spec.rollout, situation.report
    if pool is None or pool.autoscale is None or report is None or report.state != "Running":
        return None
    if report.trainIdle is None or report.rolloutIdle is None:
        return None
    if not _is_settled(situation, pool.autoscale.stabilizationSeconds):
        return None
    rule, nodes = pool.autoscale, target(situation.training, situation.status)
    step = max(1, pool.tensorParallel // situation.spec.accelerator.devicesPerNode)
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
    return AutoscaleStatus(nodes=chosen, reason=f"{nodes} → {chosen}: {why}", time=rfc3339(situation.now))


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


def _pods_to_delete(situation: AttemptSituation, count: int) -> tuple[str, ...]:
    """Return the names of the `count` pods to delete when the pool shrinks; none if `count` is zero or negative.

    Pods that are already leaving come first, then pods that are not ready, then the pods of whole replicas, of which
    the idlest comes first. The pods of the straggler lane always stay.
    """
    if count <= 0:
        return ()
    control, report = situation.observed.control, situation.report
    current = control is not None and control.attempt == situation.attempt.number
    leaving = set(control.leaving) if control is not None and current else set()
    replicas = report.replicas if report else ()
    idle = {name: replica.idle for replica in replicas for name in replica.pods}
    first_pod = {name: min(replica.pods) for replica in replicas for name in replica.pods}

    def order(pod: Pod) -> tuple[bool, bool, float, str, str]:
        replica = first_pod.get(pod.name, pod.name)
        return (pod.name not in leaving, pod.ready, -idle.get(pod.name, 0.0), replica, pod.name)

    pods = [pod for pod in situation.pods if pod.pool == ROLLOUT_GROUP and not pod.lane]
    return tuple(pod.name for pod in sorted(pods, key=order)[:count])
