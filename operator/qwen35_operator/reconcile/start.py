"""Starts the next attempt when nothing of earlier attempts may still run, and the backoff is over."""

from qwen35_operator.api.v1alpha1 import Attempt, State
from qwen35_operator.desired import object_names, ray_job
from qwen35_operator.reconcile import attempts, child_writes, elasticity, failure_rules, leftovers, releases
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.leftovers import Leftovers
from qwen35_operator.reconcile.situation import Situation
from qwen35_operator.reconcile.writes import Create, PostEvent
from qwen35_operator.status.conditions import yes
from qwen35_operator.status.times import rfc3339, seconds_since


def decide(situation: Situation) -> Verdict:
    """Return the verdict that starts the next attempt, or that waits until this is possible.

    An attempt can start when the backoff is over and nothing of earlier attempts holds it up (leftovers.py).
    """
    training, now = situation.training, situation.now
    last = attempts.last_attempt(situation.status.attempts)
    state: State = "Starting" if last is None or last.outcome != "Failed" else "Restarting"
    if last is not None and (wait := _backoff(situation, last)) > 0:
        message = f"attempt {last.number} failed: {last.reason}: {last.message}"
        return Verdict("Restarting", "Backoff", message, after=wait)
    number = attempts.next_number(situation.observed)
    if remaining := leftovers.leftovers(situation.observed, number, now):
        return _wait_for(situation, remaining, number, state)
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
            *_forced(situation, number),
            PostEvent("Normal", "AttemptStarted", f"attempt {number}: RayJob {attempt.job}"),
        ),
        {"attempts": (*situation.status.attempts, attempt)[-attempts.MAX_ATTEMPTS :]},
    )


def _wait_for(situation: Situation, remaining: Leftovers, number: int, state: State) -> Verdict:
    """Return the verdict that waits until nothing of earlier attempts may run.

    remaining: the clusters and pods to wait for. number: number of the attempt that waits.
    """
    if not remaining.lost:
        return Verdict(state, "Cleaning", f"earlier pods are still there: {remaining}", after=leftovers.POLL_SECONDS)
    message = leftovers.explanation(situation.observed, remaining.lost, number)
    return Verdict(
        state,
        "PodsNotEnded",
        message,
        (PostEvent("Warning", "PodsNotEnded", message),),
        after=leftovers.POLL_SECONDS,
        degraded=yes("PodsNotEnded", message),
    )


def _forced(situation: Situation, number: int) -> tuple[PostEvent, ...]:
    """Return the event which reports that the attempt starts only because the user set the annotation FORCE_START.

    The result is empty if the annotation does not name this attempt.
    """
    if not leftovers.is_forced(situation.observed, number):
        return ()
    message = f"attempt {number} does not wait for pods of earlier attempts: annotation {object_names.FORCE_START}"
    return (PostEvent("Warning", "ForceStarted", message),)


def _backoff(situation: Situation, last: Attempt) -> float:
    """Return the seconds until the next attempt may start; zero or negative if it may start now.

    last: the last attempt.
    """
    in_a_row = attempts.failures_in_a_row(situation.status.attempts, situation.status.retriedAttempt)
    if not in_a_row or last.endTime is None:
        return 0.0
    wait = failure_rules.backoff(situation.spec.failurePolicy.backoffSeconds, len(in_a_row))
    return wait - seconds_since(last.endTime, situation.now)
