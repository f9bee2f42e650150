"""Stopping an attempt: ask the trainer to save, wait for its word or the grace period, record, delete the RayJob.

    -control: stop ──► trainer saves ──► -progress: Stopped ──► status: attempt ended ──► RayJob deleted
                            └── grace over ─────────────────────────────▲

The order in `-control` is the memory: when it was given, and why. An attempt that was told to stop does stop, even when
the reason goes away meanwhile; the next one starts at once.
"""

from datetime import datetime

from qwen35_operator.api.training import Training
from qwen35_operator.api.v1alpha1 import Attempt, TrainingStatus
from qwen35_operator.desired import names
from qwen35_operator.reconcile import attempts, children
from qwen35_operator.reconcile.actions import Announce
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.verdict import Verdict
from qwen35_operator.settings import Settings
from qwen35_trainer.contract import Stop

SUSPEND, DEADLINE, CHANGED = "Suspend", "DeadlineExceeded", "SpecChanged"


def decide(seen: Observed, settings: Settings, now: datetime) -> Verdict | None:
    """Nothing unless the spec, the clock or an earlier order wants the attempt to end."""
    training = seen.training
    assert training is not None, "acceptance comes first"
    attempt = attempts.opened(seen)
    if attempt is None:
        return _at_rest(seen, training, now)
    order = ordered(seen, attempt)
    if order is None:
        why = _wanted(seen, training, attempt, now)
        return None if why is None else _order(seen, training, attempt, why, now)
    left = order.time + training.spec.checkpoint.graceSeconds - now.timestamp()
    if left <= 0:
        grace = training.spec.checkpoint.graceSeconds
        return stopped(seen, attempt, order, now, f"spec.checkpoint.graceSeconds {grace} are over")
    return Verdict("Suspending", "Stopping", _waiting(seen, attempt, order), after=left)


def ordered(seen: Observed, attempt: Attempt) -> Stop | None:
    """The order that the attempt was given."""
    control = seen.control
    return control.stop if control is not None and control.attempt == attempt.number else None


def stopped(seen: Observed, attempt: Attempt, order: Stop, now: datetime, how: str) -> Verdict:
    """Record an attempt that was told to stop and has, or has run out of grace."""
    message = f"attempt {attempt.number}: {how}"
    if order.reason == DEADLINE:
        changes = attempts.ended(seen, attempt, now, outcome="Failed", reason=DEADLINE, message=message)
        return Verdict("Failed", DEADLINE, message, (Announce("Warning", DEADLINE, message),), changes)
    changes = attempts.ended(seen, attempt, now, outcome="Suspended", reason=order.reason, message=message)
    return Verdict("Suspending", "Stopping", message, (Announce("Normal", "Stopped", message),), changes, after=0.0)


def time_left(status: TrainingStatus, training: Training, attempt: Attempt | None, now: datetime) -> float | None:
    """Seconds until spec.activeDeadlineSeconds; None without one."""
    deadline = training.spec.activeDeadlineSeconds
    if deadline is None:
        return None
    return deadline - status.activeSeconds - (0 if attempt is None else attempts.duration(attempt, now))


def _wanted(seen: Observed, training: Training, attempt: Attempt, now: datetime) -> str | None:
    if training.spec.suspend:
        return SUSPEND
    left = time_left(seen.status, training, attempt, now)
    if left is not None and left <= 0:
        return DEADLINE
    job = attempts.job_of(seen, attempt.number)
    changed = job is not None and job.spec_hash and job.spec_hash != names.spec_hash(training)
    return CHANGED if changed else None


def _order(seen: Observed, training: Training, attempt: Attempt, why: str, now: datetime) -> Verdict:
    order = Stop(id=f"{attempt.number}-{why}", reason=why, time=now.timestamp())
    if attempts.report_of(seen, attempt) is None and (seen.reported is None or seen.reported.problem is None):
        # No trainer has spoken: nothing has been done that could be saved.
        return stopped(seen, attempt, order, now, "stopped before the trainer had started")
    actions = children.ordered_to_stop(seen, training, attempt.number, order)
    event = Announce("Normal", "Stopping", f"attempt {attempt.number} is asked to save and stop: {why}")
    grace = float(training.spec.checkpoint.graceSeconds)
    return Verdict("Suspending", "Stopping", _waiting(seen, attempt, order), (*actions, event), after=grace)


def _at_rest(seen: Observed, training: Training, now: datetime) -> Verdict | None:
    """No attempt is open: suspended, out of time, or neither."""
    if training.spec.suspend:
        if seen.clusters or seen.pods or any(job.deployment not in attempts.OVER for job in seen.jobs):
            return Verdict("Suspending", "Cleaning", "the pods of the last attempt are being deleted")
        return Verdict("Suspended", "Suspended", "set spec.suspend: false to go on from the last checkpoint")
    left = time_left(seen.status, training, None, now)
    if left is not None and left <= 0:
        message = f"spec.activeDeadlineSeconds {training.spec.activeDeadlineSeconds} are over"
        return Verdict("Failed", DEADLINE, message, (Announce("Warning", DEADLINE, message),))
    return None


def _waiting(seen: Observed, attempt: Attempt, order: Stop) -> str:
    report = attempts.report_of(seen, attempt)
    heard = report is not None and report.stopAcknowledged == order.id
    said = "is saving" if heard else "has not answered yet"
    return f"attempt {attempt.number} was asked to save and stop ({order.reason}); the trainer {said}"
