"""The size of the rollout pool: what it should be, and the steps that bring a live cluster there.

    spec.rollout.nodes, or what autoscale chose ──► target ──► -control ──► RayCluster replicas, idlest pods first

RayJob ignores later edits of its cluster, so the RayCluster itself is patched, and only where nobody else decides its
size: Ray's autoscaler, or Kueue without elastic jobs.
"""

from dataclasses import dataclass
from datetime import datetime

from qwen35_operator.api.training import Training
from qwen35_operator.api.v1alpha1 import Attempt, AutoscaleStatus
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.actions import Action, Announce, Scale
from qwen35_operator.reconcile.observed import Observed, Pod, RayCluster
from qwen35_operator.status.times import rfc3339, seconds_since
from qwen35_trainer.contract import Progress

POOL = "rollout"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ELASTIC_LABEL = "kueue.x-k8s.io/elastic-job"


@dataclass(frozen=True)
class Resize:
    """`leaving` are the pods that the trainer should give no more work."""

    nodes: int
    leaving: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    held: str | None = None
    """Why the live cluster keeps another size."""


def target(seen: Observed, training: Training) -> int:
    """Nodes that the rollout pool is to have: 0 where there is no such pool of its own."""
    pool = training.spec.rollout
    if pool is None or training.spec.mode != "FullyAsync":
        return 0
    if pool.autoscale is None or seen.status.autoscale is None:
        return pool.nodes
    return min(max(seen.status.autoscale.nodes, pool.minNodes or pool.nodes), pool.maxNodes or pool.nodes)


def resize(seen: Observed, training: Training, attempt: Attempt, nodes: int) -> Resize:
    """What makes the attempt's cluster have so many rollout nodes; nothing when it has."""
    cluster = attempts.cluster_of(seen, attempt.number)
    pool = training.spec.rollout
    if cluster is None or cluster.deleting is not None or pool is None or nodes == 0:
        return Resize(nodes)
    index, group = next(((at, one) for at, one in enumerate(cluster.groups) if one.name == POOL), (0, None))
    if group is None:
        return Resize(nodes)
    here = {pod.name for pod in seen.pods}
    least, most = min(pool.minNodes or pool.nodes, nodes), max(pool.maxNodes or pool.nodes, nodes)
    if group.replicas == nodes:
        return Resize(nodes, tuple(name for name in group.leaving if name in here))
    if held := _held(training, cluster):
        return Resize(nodes, held=f"{held}; it has {group.replicas} nodes, and {nodes} with the next attempt")
    victims = _victims(seen, training, attempt, group.replicas - nodes)
    scale = Scale(
        cluster=cluster.name,
        uid=cluster.uid,
        index=index,
        group=POOL,
        present=group.replicas,
        wanted=nodes,
        least=least,
        most=most,
        victims=victims,
    )
    event = Announce("Normal", "Scaled", f"rollout nodes {group.replicas} → {nodes}")
    return Resize(nodes, victims, (scale, event))


def autoscaled(
    seen: Observed, training: Training, attempt: Attempt, progress: Progress | None, now: datetime
) -> AutoscaleStatus | None:
    """A new size, one step up or down; None to stay. Reads what the trainer reports as idle shares."""
    pool = training.spec.rollout
    if pool is None or pool.autoscale is None or progress is None or progress.state != "Running":
        return None
    if progress.trainIdle is None or progress.rolloutIdle is None or not _settled(seen, training, attempt, now):
        return None
    rule, nodes = pool.autoscale, target(seen, training)
    step = max(1, pool.tensorParallel // training.spec.accelerator.perNode)
    shares = f"train idle {progress.trainIdle:.0%}, rollout idle {progress.rolloutIdle:.0%}"
    if progress.trainIdle > rule.growAbove and progress.rolloutIdle <= rule.shrinkAbove:
        wanted, why = nodes + step, f"the train pool waits for rollouts: {shares}"
    elif progress.rolloutIdle > rule.shrinkAbove and progress.trainIdle <= rule.growAbove:
        wanted, why = nodes - step, f"the rollout pool has too little to do: {shares}"
    else:
        return None
    if not (pool.minNodes or pool.nodes) <= wanted <= (pool.maxNodes or pool.nodes):
        return None
    return AutoscaleStatus(nodes=wanted, reason=f"{nodes} → {wanted}: {why}", time=rfc3339(now))


def _settled(seen: Observed, training: Training, attempt: Attempt, now: datetime) -> bool:
    """Whether the present size has been there for long enough to be judged."""
    pool = training.spec.rollout
    assert pool is not None
    assert pool.autoscale is not None
    ready = [pod for pod in attempts.pods_of(seen, attempt.number) if pod.pool == POOL and pod.ready]
    times = [attempt.startTime or "", *([seen.status.autoscale.time] if seen.status.autoscale else [])]
    quiet = min(seconds_since(time, now) for time in times if time)
    return len(ready) == target(seen, training) and quiet >= pool.autoscale.stabilizationSeconds


def _held(training: Training, cluster: RayCluster) -> str | None:
    if cluster.autoscaled:
        return "Ray's autoscaler decides the size of this cluster"
    if QUEUE_LABEL in training.labels and training.labels.get(ELASTIC_LABEL) != "true":
        return f"the queue admitted this size; label {ELASTIC_LABEL}: true would let it change"
    return None


def _victims(seen: Observed, training: Training, attempt: Attempt, count: int) -> tuple[str, ...]:
    """Pods to go when shrinking: those named before, those that do not work, then the idlest replicas, whole."""
    if count <= 0:
        return ()
    pods = [pod for pod in attempts.pods_of(seen, attempt.number) if pod.pool == POOL]
    report = attempts.report_of(seen, attempt)
    idle = {name: replica.idle for replica in (report.replicas if report else ()) for name in replica.pods}
    earlier = (
        set(seen.control.leaving) if seen.control is not None and seen.control.attempt == attempt.number else set()
    )
    mates = {name: min(replica.pods) for replica in (report.replicas if report else ()) for name in replica.pods}

    def order(pod: Pod) -> tuple[bool, bool, float, str, str]:
        return (pod.name not in earlier, pod.ready, -idle.get(pod.name, 0.0), mates.get(pod.name, pod.name), pod.name)

    return tuple(pod.name for pod in sorted(pods, key=order)[:count])
