"""The next attempt: when nothing of the earlier ones is left, and the backoff is over."""

from datetime import datetime

from qwen35_operator.api.v1alpha1 import Attempt, State
from qwen35_operator.desired import names, ray_job
from qwen35_operator.reconcile import attempts, children, elasticity, failure
from qwen35_operator.reconcile.actions import Announce, Create
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.verdict import Verdict
from qwen35_operator.settings import Settings
from qwen35_operator.status.times import rfc3339, seconds_since

FENCE = 120.0
"""Seconds after its deletion at which a pod no longer holds up the next attempt: its node is gone, and nobody will
confirm its end."""


def decide(seen: Observed, settings: Settings, now: datetime) -> Verdict | None:
    """Nothing while an attempt is open."""
    if attempts.opened(seen) is not None:
        return None
    training, last = seen.training, attempts.last(seen)
    assert training is not None, "acceptance comes first"
    state: State = "Starting" if last is None or last.outcome != "Failed" else "Restarting"
    if last is not None and (wait := _backoff(seen, last, now)) > 0:
        return Verdict(
            "Restarting", "Backoff", f"attempt {last.number} failed: {last.reason}: {last.message}", after=wait
        )
    if left := lingering(seen, now):
        return Verdict(state, "Cleaning", f"earlier pods are still there: {', '.join(left[:5])}", after=FENCE)
    number = attempts.next_number(seen)
    nodes = elasticity.target(seen, training)
    wanted = children.controlling(training, number, nodes)
    job = ray_job.build(training, settings, attempt=number, rollout_nodes=nodes)
    attempt = Attempt(
        number=number, job=names.job_name(training.name, number), outcome="Running", startTime=rfc3339(now)
    )
    history = (*seen.status.attempts, attempt)[-attempts.LONGEST :]
    return Verdict(
        state,
        "Starting",
        f"attempt {number} is starting",
        (
            *children.ensured(seen, training, wanted),
            Create(job),
            Announce("Normal", "AttemptStarted", f"attempt {number}: RayJob {attempt.job}"),
        ),
        {"attempts": history},
    )


def lingering(seen: Observed, now: datetime) -> list[str]:
    """Clusters and pods of earlier attempts: two trainers must never write one checkpoint folder."""
    clusters = [f"RayCluster {cluster.name}" for cluster in seen.clusters]
    pods = [
        f"pod {pod.name}"
        for pod in seen.pods
        if pod.phase not in ("Succeeded", "Failed")
        and (pod.deleting is None or (now - pod.deleting).total_seconds() < FENCE)
    ]
    return clusters + pods


def _backoff(seen: Observed, last: Attempt, now: datetime) -> float:
    assert seen.training is not None
    if last.outcome != "Failed" or last.endTime is None:
        return 0.0
    wait = failure.backoff(seen.training.spec.failurePolicy.backoffSeconds, seen.status.restarts)
    return wait - seconds_since(last.endTime, now)
