"""Starts the next attempt when nothing of earlier attempts may still run, and the backoffs are over.

    attempts that failed in a row                 failurePolicy.backoffSeconds, doubled with each, up to an hour
    attempts that their user stopped in the last  the first three: none; then 10 s, doubled with each, up to 10 minutes
    hour, by a changed spec or spec.suspend

Without the second backoff, a program that edits the spec in a loop would have the operator create and delete Ray
clusters as fast as it edits.
"""

from typing import Final

from qwen35_operator.api.v1alpha1 import Attempt, State
from qwen35_operator.desired import object_names, ray_job
from qwen35_operator.reconcile import attempts, child_writes, elasticity, failure_rules, leftovers, releases
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.leftovers import Leftovers
from qwen35_operator.reconcile.situation import Situation
from qwen35_operator.reconcile.writes import Create, PostEvent
from qwen35_operator.status.conditions import yes
from qwen35_operator.status.times import rfc3339, seconds_since
from qwen35_trainer.contract.retry import backoff_seconds

FREE_CHANGES: Final = 3
"""Number of attempts that a user may stop within an hour before the next attempt has to wait."""
FIRST_CHANGE_BACKOFF_SECONDS: Final = 10.0
MAX_CHANGE_BACKOFF_SECONDS: Final = 600.0
"""Maximum wait of an attempt after changes. A loop of edits then creates 14 clusters in its first hour, and 10 in the next."""


def decide(situation: Situation) -> Verdict:
    """Return the verdict that starts the next attempt, or that waits until this is possible.

    An attempt can start when both backoffs are over and nothing of earlier attempts holds it up (leftovers.py).
    """
    training, now = situation.training, situation.now
    last = attempts.last_attempt(situation.status.attempts)
    state: State = "Starting" if last is None or last.outcome != "Failed" else "Restarting"
    if last is not None and (wait := _backoff(situation, last)) > 0:
        message = f"attempt {last.number} failed: {last.reason}: {last.message}"
        return Verdict("Restarting", "Backoff", message, after=wait)
    if last is not None and (wait := _change_backoff(situation)) > 0:
        return Verdict(state, "ChangedTooOften", _too_many_changes(situation), after=wait)
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

    remaining: the RayJobs, clusters and pods to wait for. number: number of the attempt that waits.
    """
    if not remaining.lost and not remaining.stray:
        after = leftovers.POLL_SECONDS if remaining.clusters or remaining.pods else leftovers.JOB_SECONDS
        return Verdict(state, "Cleaning", f"parts of earlier attempts are still there: {remaining}", after=after)
    messages: list[str] = []
    observed = situation.observed
    if remaining.lost:
        messages.append(leftovers.explanation(observed, remaining.lost, number))
    if remaining.stray:
        messages.append(leftovers.stray_explanation(observed, remaining.stray, number))
    reason, message = "PodsNotEnded" if remaining.lost else "ClusterNotOwned", "; ".join(messages)
    return Verdict(
        state,
        reason,
        message,
        (PostEvent("Warning", reason, message),),
        after=leftovers.POLL_SECONDS,
        degraded=yes(reason, message),
    )


def _forced(situation: Situation, number: int) -> tuple[PostEvent, ...]:
    """Return the event which reports that the attempt starts only because the user set the annotation FORCE_START.

    The result is empty if the annotation does not name this attempt.
    """
    if not leftovers.is_forced(situation.observed, number):
        return ()
    message = (
        f"attempt {number} does not wait for what earlier attempts have left: annotation {object_names.FORCE_START}"
    )
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


def _change_backoff(situation: Situation) -> float:
    """Return the seconds until the next attempt may start after those that the user has stopped.

    The result is zero or negative if it may start now.
    """
    ends = [attempt.endTime for attempt in situation.status.attempts if attempt.outcome == "Suspended"]
    stopped = attempts.stopped_by_changes(situation.status.attempts, situation.now)
    if stopped <= FREE_CHANGES or ends[-1] is None:
        return 0.0
    return _wait_after_changes(stopped) - seconds_since(ends[-1], situation.now)


def _wait_after_changes(stopped: int) -> float:
    """Return the seconds from the end of the last stopped attempt to the start of the next one.

    stopped: number of attempts that the user has stopped within an hour; more than FREE_CHANGES.
    """
    return backoff_seconds(
        stopped - FREE_CHANGES, first=FIRST_CHANGE_BACKOFF_SECONDS, maximum=MAX_CHANGE_BACKOFF_SECONDS
    )


def _too_many_changes(situation: Situation) -> str:
    stopped = attempts.stopped_by_changes(situation.status.attempts, situation.now)
    return (
        f"{stopped} attempts were stopped within an hour by changes of the spec or of spec.suspend: the next one starts "
        f"{_wait_after_changes(stopped):g} s after the last stop. Find out what edits the training so often."
    )
