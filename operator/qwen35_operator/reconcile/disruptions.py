"""The PodDisruptionBudget of a training: it exists while the spec wants it and the open attempt has ready head or train pods.

    running attempt ─► protection: create it, and restore it if somebody has changed it
    always          ─► removal: delete it when it protects nothing, or when the spec does not want it any more

In between it stays as it is: while an attempt saves its last checkpoint, its pods are protected in their old number, whatever the
edited spec says. Without ready pods it would protect nothing, because Kubernetes evicts other pods in any case, and the usual alerts
report a budget whose pods are missing: a suspended or queued training would raise one after 15 minutes.

No other write depends on it. If the API server refuses to create or delete it, for example because the operator lacks a permission that
only these trainings need, the next try follows after RETRY_SECONDS, and `Degraded` says why, unless it has another reason.
"""

from dataclasses import replace
from datetime import datetime

from qwen35_operator.desired import disruption_budget
from qwen35_operator.desired.object_names import ROLLOUT, budget_name
from qwen35_operator.kube.kinds import DISRUPTION_BUDGET
from qwen35_operator.kube.object_records import Child
from qwen35_operator.reconcile import attempts, child_writes
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.reconcile.writes import Apply, Create, Delete
from qwen35_operator.status.conditions import Finding, yes

RETRY_SECONDS = 60.0
"""Time between two tries to create or delete it, after the API server has refused one. The reason may last for weeks."""


def protection(situation: AttemptSituation) -> tuple[Create | Apply, ...]:
    """Return the write that creates or restores the budget of a running attempt. The result is empty if no write is needed."""
    observed, training = situation.observed, situation.training
    if not _is_needed(observed) or (_child(observed) is None and retry_after(observed, situation.now) is not None):
        return ()
    write = child_writes.ensure_child(observed, disruption_budget.build(training, situation.attempt.number))
    return () if write is None else (replace(write, is_repair=True),)


def removal(observed: Observed, now: datetime) -> tuple[Delete, ...]:
    """Return the deletion of a budget that is not needed.

    The result is empty if no such budget exists, if it is being deleted already, or if a refused deletion must not be tried again yet.
    """
    child = _child(observed)
    if child is None or child.deleting is not None or _is_needed(observed) or retry_after(observed, now) is not None:
        return ()
    return (Delete(child.kind, child.name, child.uid, is_repair=True),)


def retry_after(observed: Observed, now: datetime) -> float | None:
    """Return the seconds until the next try, after the API server has refused one; None if it may be tried now."""
    if observed.budget_try is None:
        return None
    wait = RETRY_SECONDS - (now - observed.budget_try.time).total_seconds()
    return wait if wait > 0 else None


def problem(observed: Observed, now: datetime) -> Finding | None:
    """Return why the budget is missing although it is needed, exists although it is not, or is not watched; None otherwise.

    A refusal does not count any more when the next try is due: if that one is refused too, the status says so.
    """
    needed, refused = _is_needed(observed), observed.budget_try
    waits = retry_after(observed, now) is not None
    if waits and needed != (_child(observed) is not None) and refused is not None and refused.refusal is not None:
        return yes(*refused.refusal)
    limitations = observed.limitations if needed else ()
    return next((yes("Forbidden", f"{each.path}: {each.message} {each.fix}") for each in limitations), None)


def _is_needed(observed: Observed) -> bool:
    """Return whether the open attempt has pods that a budget protects, and the spec wants one.

    If the spec cannot be read, a budget that exists protects them as it is.
    """
    attempt, training = attempts.open_attempt(observed), observed.training
    if attempt is None or (training is not None and not disruption_budget.is_wanted(training)):
        return False
    return any(pod.ready and pod.pool != ROLLOUT for pod in attempts.pods_of(observed, attempt.number))


def _child(observed: Observed) -> Child | None:
    return observed.children.get((DISRUPTION_BUDGET.name, budget_name(observed.name)))
