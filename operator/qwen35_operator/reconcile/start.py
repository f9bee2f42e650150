"""Starts the next attempt when the clusters and pods of earlier attempts are gone and the backoff is over."""

from datetime import datetime

from qwen35_operator.api.v1alpha1 import Attempt, State
from qwen35_operator.desired import object_names, ray_job
from qwen35_operator.reconcile import attempts, child_writes, elasticity, failure_rules, releases
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.situation import Situation
from qwen35_operator.reconcile.writes import Create, PostEvent
from qwen35_operator.status.times import rfc3339, seconds_since

LOST_POD_SECONDS = 120.0
"""Maximum time for which a pod delays the next attempt after its deletion was requested. A pod that exists for longer
is probably on a lost Kubernetes node, and nothing will confirm that it has ended."""


def decide(situation: Situation) -> Verdict:
    """Return the verdict that starts the next attempt, or that waits until this is possible.

    An attempt can start when the backoff is over and the clusters and pods of earlier attempts are gone.
    """
    training, now = situation.training, situation.now
    last = attempts.last_attempt(situation.status.attempts)
    state: State = "Starting" if last is None or last.outcome != "Failed" else "Restarting"
    if last is not None and (wait := _backoff(situation, last)) > 0:
        message = f"attempt {last.number} failed: {last.reason}: {last.message}"
        return Verdict("Restarting", "Backoff", message, after=wait)
    if remaining := leftovers(situation.observed, now):
        message = f"earlier pods are still there: {', '.join(remaining[:5])}"
        return Verdict(state, "Cleaning", message, after=LOST_POD_SECONDS)
    number = attempts.next_number(situation.observed)
    nodes = elasticity.target(training, situation.status)
    control = child_writes.control_message(training, number, nodes)
    job = ray_job.build(
        training,
        situation.settings,
        attempt=number,
        rollout_nodes=nodes,
        release=releases.for_next_attempt(situation),
    )
    name = object_names.job_name(training.name, number)
    attempt = Attempt(number=number, job=name, outcome="Running", startTime=rfc3339(now))
    return Verdict(
        state,
        "Starting",
        f"attempt {number} is starting",
        (
            *child_writes.ensure(situation.observed, training, situation.settings, control),
            Create(job),
            PostEvent("Normal", "AttemptStarted", f"attempt {number}: RayJob {attempt.job}"),
        ),
        {"attempts": (*situation.status.attempts, attempt)[-attempts.MAX_ATTEMPTS :]},
    )


def leftovers(observed: Observed, now: datetime) -> list[str]:
    """Return the names of the clusters and pods of earlier attempts that must be gone before a new attempt starts.

    Otherwise two trainers could write to the same checkpoint folder.
    """
    clusters = [f"RayCluster {cluster.name}" for cluster in observed.clusters]
    pods = [
        f"pod {pod.name}"
        for pod in observed.pods
        if pod.phase not in ("Succeeded", "Failed")
        and (pod.deleting is None or (now - pod.deleting).total_seconds() < LOST_POD_SECONDS)
    ]
    return clusters + pods


def _backoff(situation: Situation, last: Attempt) -> float:
    """Return the seconds until the next attempt may start; zero or negative if it may start now.

    last: the last attempt.
    """
    in_a_row = attempts.failures_in_a_row(situation.status.attempts, situation.status.retriedAttempt)
    if not in_a_row or last.endTime is None:
        return 0.0
    wait = failure_rules.backoff(situation.spec.failurePolicy.backoffSeconds, len(in_a_row))
    return wait - seconds_since(last.endTime, situation.now)
