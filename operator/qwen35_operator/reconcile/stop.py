"""Stops an attempt: orders the trainer to save, waits for its answer or the grace period, and records the end.

An attempt is stopped if `spec.suspend` is set, if its time is over (`spec.activeDeadlineSeconds`), if the spec has
changed in a way that the attempt cannot take over, or if the training is being deleted and its user wants a last
checkpoint. After a change of the spec, the next attempt uses the new spec.

    -control: stop ──► trainer saves ──► -progress: Stopped ──► status: attempt ended ──► RayJob deleted
                            └── grace period over ──────────────────────▲

The RayJob is deleted by `cleanup.py`.

The status records when and why the attempt was ordered to stop, so that the grace period ends although somebody removes the order
from `-control`, or it cannot be written there. An order is never withdrawn: the attempt
stops even if the reason for the order disappears meanwhile. The next attempt then starts immediately.

An order alone ends the attempt, and not the training: whether the deadline is over is judged by spec and status. The user
may have extended it since, and everybody with rights on the namespace's ConfigMaps can write an order.
"""

from collections.abc import Sequence
from typing import Any

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import StopRecord
from qwen35_operator.desired.spec_hash import spec_hash
from qwen35_operator.kube.object_records import Pod, RayJob
from qwen35_operator.reconcile import attempts, child_writes, leftovers
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.situation import AttemptSituation, Situation, order_id
from qwen35_operator.reconcile.writes import PostEvent
from qwen35_operator.status.conditions import yes
from qwen35_operator.status.text_limits import cut
from qwen35_operator.status.times import at, rfc3339
from qwen35_operator.status.times import parse as parse_time
from qwen35_trainer.contract import StopOrder

SUSPEND, DEADLINE, CHANGED, DELETED = "Suspend", "DeadlineExceeded", "SpecChanged", "Deleted"


def decide(situation: AttemptSituation) -> Verdict | None:
    """Return a verdict that stops the open attempt; None if there is no reason to stop it.

    The reasons are deletion, spec.suspend, the deadline, a change of the spec, and an earlier order to stop. If no trainer has
    reported yet, the verdict records the end of the attempt immediately. Otherwise it orders the trainer to stop. After
    an order, the verdict records the end only if the queue has evicted the attempt or the grace period is over. Before
    that, `completion.decide` records the end when the trainer has stopped or failed.
    """
    if situation.stop is None:
        reason = _reason_to_stop(situation)
        return None if reason is None else _order(situation, reason)
    job = situation.job
    if job is not None and job.held and situation.cluster is None and not situation.pods:
        return stopped(situation, situation.stop, "its queue has evicted it, so no trainer runs")
    grace = situation.spec.checkpoint.graceSeconds
    remaining = situation.stop.time + grace - situation.now.timestamp()
    if remaining <= 0:
        return stopped(situation, situation.stop, f"spec.checkpoint.graceSeconds {grace} are over")
    number, training = situation.attempt.number, situation.training
    writes = child_writes.order_to_stop(situation.observed, training, number, situation.stop)
    message, changes = _waiting(situation, situation.stop), _recorded(situation, situation.stop)
    return Verdict("Suspending", "Stopping", message, writes, changes, after=remaining)


def stay_stopped(situation: Situation) -> Verdict | None:
    """Return the verdict on a training that must not start an attempt, because it is suspended or past its deadline.

    Returns None for any other training.
    """
    observed = situation.observed
    if situation.spec.suspend:
        running = any(not job.ended for job in observed.jobs)
        if stray := leftovers.stray(observed, situation.now):
            explanation = leftovers.stray_explanation(observed, stray, None)
            return Verdict("Suspending", "ClusterNotOwned", explanation, degraded=yes("ClusterNotOwned", explanation))
        if observed.clusters or observed.pods or running:
            if lost := leftovers.unconfirmed(observed, situation.now):
                return _wait_for_lost(lost)
            message = "the pods of the last attempt are being deleted"
            waits = [leftovers.STRAY_CLUSTER_SECONDS] if observed.clusters else []
            if (wait := leftovers.seconds_until_lost(observed.pods, situation.now)) is not None:
                waits.append(wait)
            return Verdict("Suspending", "Cleaning", message, after=min(waits, default=None))
        return Verdict("Suspended", "Suspended", f"set spec.suspend: false to {_next_start(situation)}")
    remaining = time_to_deadline(situation)
    if remaining is not None and remaining <= 0:
        message = f"spec.activeDeadlineSeconds {situation.spec.activeDeadlineSeconds} are over"
        return Verdict("Failed", DEADLINE, message, (PostEvent("Warning", DEADLINE, message),))
    return None


def _wait_for_lost(pods: Sequence[Pod]) -> Verdict:
    """Return the verdict of a suspension that waits for pods whose deletion was requested long ago."""
    reason, message = "PodsNotEnded", leftovers.explanation_while_stopped(pods)
    event, degraded = PostEvent("Warning", reason, message), yes(reason, message)
    return Verdict("Suspending", reason, message, (event,), after=leftovers.POLL_SECONDS, degraded=degraded)


def stopped(situation: AttemptSituation, order: StopOrder, how: str) -> Verdict:
    """Return the verdict that records the end of an attempt that was ordered to stop.

    how: the way in which the attempt ended, as a text for the status.
    """
    attempt, observed, now = situation.attempt, situation.observed, situation.now
    message = f"attempt {attempt.number}: {how}"
    remaining = time_to_deadline(situation)
    if order.reason == DEADLINE and remaining is not None and remaining <= 0:
        changes = attempts.ended(observed, attempt, now, outcome="Failed", reason=DEADLINE, message=message)
        return Verdict("Failed", DEADLINE, message, (PostEvent("Warning", DEADLINE, message),), changes)
    changes = attempts.ended(observed, attempt, now, outcome="Suspended", reason=order.reason, message=message)
    return Verdict("Suspending", "Stopping", message, (PostEvent("Normal", "Stopped", message),), changes, after=0.0)


def saves(situation: Situation) -> bool:
    """Return whether the trainer saves a checkpoint when it is asked to stop: only if the training has storage for it."""
    return situation.spec.checkpoint.storage is not None


def time_to_deadline(situation: Situation) -> float | None:
    """Return the seconds that are left of spec.activeDeadlineSeconds; None without such a limit.

    The result is zero or negative if the deadline has passed.
    """
    deadline = situation.spec.activeDeadlineSeconds
    return None if deadline is None else deadline - situation.active_seconds


def _reason_to_stop(situation: AttemptSituation) -> str | None:
    if situation.observed.deleting:
        return DELETED
    if situation.spec.suspend:
        return SUSPEND
    remaining = time_to_deadline(situation)
    if remaining is not None and remaining <= 0:
        return DEADLINE
    return CHANGED if _has_changed(situation.job, situation.training) else None


def _has_changed(job: RayJob | None, training: TrainingResource) -> bool:
    """Return whether the attempt was started from another spec.

    The hash of an attempt that a later operator has started contains fields that this operator cannot read.
    """
    if job is None or not job.spec_hash or training.unknown:
        return False
    return job.spec_hash != spec_hash(training)


def _order(situation: AttemptSituation, reason: str) -> Verdict:
    number = situation.attempt.number
    order = StopOrder(id=order_id(number, reason), reason=reason, time=situation.now.timestamp())
    has_problem = attempts.report_problem(situation.observed) is not None
    if situation.report is None and not has_problem and not _is_report_lost(situation):
        # No trainer has reported yet, so there is nothing to save.
        return stopped(situation, order, "stopped before the trainer had started")
    writes = child_writes.order_to_stop(situation.observed, situation.training, number, order)
    event = PostEvent("Normal", "Stopping", f"attempt {number} is asked to {_asked(situation)}: {reason}")
    grace = float(situation.spec.checkpoint.graceSeconds)
    message, changes = _waiting(situation, order), _recorded(situation, order)
    return Verdict("Suspending", "Stopping", message, (*writes, event), changes, after=grace)


def _recorded(situation: AttemptSituation, order: StopOrder) -> dict[str, Any]:
    """Return the change of the status that records the order; no change if an order is recorded."""
    attempt = situation.attempt
    if attempt.stop is not None:
        return {}
    time = rfc3339(at(min(order.time, situation.now.timestamp())))
    record = StopRecord(reason=cut(order.reason, 128), time=time)
    return {"attempts": attempts.replaced(situation.status.attempts, attempt.model_copy(update={"stop": record}))}


def _is_report_lost(situation: AttemptSituation) -> bool:
    """Return whether the trainer of this attempt has reported, and somebody has since deleted or emptied `-progress`.

    The evidence is in the status, which still contains the time of the report.
    """
    progress, started = situation.status.progress, situation.attempt.startTime
    if situation.observed.report is not None or progress is None or progress.time is None or started is None:
        return False
    return parse_time(progress.time) >= parse_time(started)


def _waiting(situation: AttemptSituation, order: StopOrder) -> str:
    report = situation.report
    acknowledged = report is not None and report.stopAcknowledged == order.id
    busy = "is saving" if saves(situation) else "is ending"
    answer = busy if acknowledged else "has not answered yet"
    request = f"attempt {situation.attempt.number} was asked to {_asked(situation)} ({order.reason})"
    return f"{request}; the trainer {answer}"


def _asked(situation: Situation) -> str:
    return "save and stop" if saves(situation) else "stop, without checkpoint.storage to save to"


def _next_start(situation: Situation) -> str:
    """Return where the next attempt will start, for a message."""
    if not saves(situation):
        return "start from the beginning: without checkpoint.storage nothing was saved"
    if situation.observed.status.lastCheckpoint is None:
        return "start; no checkpoint was saved so far"
    return "continue from the last checkpoint"
