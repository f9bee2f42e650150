"""Decides what to write to the cluster and what to report.

The same inputs give the same decision, because this module reads neither a clock nor the cluster.

    deletion        deletion    with the finalizer for a last checkpoint: stop the open attempt, then let the training go
    always          cleanup     the training has ended: keep its state; delete its children when
                                cleanupSecondsAfterFinished is over
                    acceptance  the spec cannot be read or run, or a kind cannot be watched: report why, change nothing
    open attempt    completion  the attempt has ended: record how
                    stop        suspended, past its deadline, or the spec changed: order, wait, record
                    running     keep objects, pool size and status up to date
    no attempt      stop        suspended or past its deadline: stay so
                    start       wait for cleanup and backoff, then create the next attempt

The policies are asked in this order, and the first one with a verdict decides. When an attempt ends, the status records
how it ended and what follows before anything else is done. After a crash in between, the next decision therefore finds
either the evidence of the end or the record of it.

RayJobs of ended attempts are deleted last, and a PodDisruptionBudget that protects nothing (`disruptions`): a refused deletion does not
keep the other writes from being carried out.
"""

from dataclasses import replace
from datetime import datetime

from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from qwen35_operator.kube.kinds import RAY_JOB
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import (
    acceptance,
    attempts,
    child_writes,
    cleanup,
    completion,
    deletion,
    disruptions,
    releases,
    running,
    start,
    stop,
)
from qwen35_operator.reconcile.decision import Decision, Verdict
from qwen35_operator.reconcile.new_status import new_status
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.situation import AttemptSituation, Situation, situation_of
from qwen35_operator.reconcile.writes import Apply, ClusterWrite, Create, RemoveFinalizer


def decide(observed: Observed, settings: OperatorSettings, now: datetime) -> Decision:
    """Return what to write to the cluster and to the status, and when to decide again at the latest.

    The policies are asked in order, and the first one with a verdict decides. Nothing is written for a training that is
    being deleted, unless its user wants a last checkpoint.
    """
    if observed.deleting and not observed.saves_before_deletion:
        return Decision((), observed.status)  # the API server deletes the children with their owner
    recorded = observed.status.attempts
    observed = attempts.with_clock(attempts.with_adopted(observed), now)
    observed = releases.with_release(observed, settings)
    verdict = deletion.decide(observed, settings, now) if observed.deleting else _verdict(observed, settings, now)
    warnings = deletion.warnings(observed) if observed.deleting else ()
    if verdict is None:
        return Decision((*warnings, RemoveFinalizer(LAST_CHECKPOINT)), observed.status)
    status, copy_after = new_status(observed, verdict, now)
    if observed.unavailable:
        return Decision(
            (), status, min((each for each in (verdict.after, copy_after) if each is not None), default=None)
        )
    deletions, delete_after = cleanup.ended_jobs(observed, now)
    times = verdict.after, copy_after, delete_after, observed.repair_after, disruptions.retry_after(observed, now)
    waits = [seconds for seconds in times if seconds is not None]
    if status.attempts != recorded:
        waits.append(0.0)  # the next decision, made from the new record, follows immediately
    deletions = (*deletions, *disruptions.removal(observed, now))
    return Decision((*warnings, *verdict.writes, *deletions), status, min(waits, default=None))


def _verdict(observed: Observed, settings: OperatorSettings, now: datetime) -> Verdict:
    if (verdict := cleanup.decide(observed, now)) is not None:
        return verdict
    accepted = acceptance.accept(observed, settings)
    if isinstance(accepted, Verdict):
        return accepted
    situation = situation_of(observed, accepted, settings, now)
    if isinstance(situation, AttemptSituation):
        verdict = completion.decide(situation) or stop.decide(situation) or running.decide(situation)
        return _with_repairs(verdict, situation)
    verdict = stop.stay_stopped(situation) or start.decide(situation)
    return _with_repairs(verdict, situation) if observed.pods else verdict


def _with_repairs(verdict: Verdict, situation: Situation) -> Verdict:
    """Return the verdict with the repairs of changed and deleted children.

    Repairs come first because children such as the NetworkPolicy protect pods that exist, except that an order to stop does not
    wait for them. A new attempt starts only if its children are as desired, and creates those that are missing; no other write
    depends on repairs.
    """
    starts = any(isinstance(write, Create) and write.manifest["kind"] == RAY_JOB.name for write in verdict.writes)
    needed = child_writes.repairs(situation.observed, situation.training, situation.settings)
    repairs = tuple(replace(write, is_repair=not starts) for write in needed if isinstance(write, Apply) or not starts)
    repaired = {_child_of(write) for write in repairs}
    others = tuple(write for write in verdict.writes if _child_of(write) not in repaired)
    return replace(verdict, writes=(*others, *repairs) if verdict.state == "Suspending" else (*repairs, *others))


def _child_of(write: ClusterWrite) -> tuple[str, str] | None:
    """Return kind and name of the child that a write creates or changes; None if it does neither."""
    if not isinstance(write, Create | Apply):
        return None
    return write.manifest["kind"], write.manifest["metadata"]["name"]
