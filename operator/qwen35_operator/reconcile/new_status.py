"""Builds the status from the observation and the verdict.

A value is copied from the old status only if it cannot be observed any more, for example after a child was deleted.
"""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import (
    Attempt,
    LastCheckpoint,
    LastExport,
    PodPool,
    PoolStatus,
    ProgressStatus,
    ReleaseStatus,
    Totals,
    TrainingStatus,
)
from qwen35_operator.desired import object_names, pod_size
from qwen35_operator.desired.queueing import QUEUE_LABEL
from qwen35_operator.reconcile import attempts, disruptions
from qwen35_operator.reconcile.decision import Decision, Verdict
from qwen35_operator.reconcile.elasticity import target
from qwen35_operator.reconcile.even_spread import fraction
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.writes import Delete, RefusedWrite, is_of_budget, is_repair
from qwen35_operator.status.conditions import ConditionType, Finding, conditions, no, true_condition, yes
from qwen35_operator.status.times import at, parse, rfc3339, seconds_since
from qwen35_trainer.contract import ProgressReport

MIN_PROGRESS_SECONDS = 10.0
"""Minimum time between two writes of the status that only copy a trainer's numbers: each is a write to etcd."""
MAX_COPIES_PER_SECOND = 10.0
"""Maximum rate of these writes for all trainings together, which takes an API server about a quarter of a core (docs/benchmarks.md)."""
MAX_OVERDUE_COPIES_PER_SECOND = 50.0
"""Maximum rate at which a process that has just begun to lead makes up for overdue writes of this kind, next to those that become due. Checkpoints
are not held up by them."""

NO_STORAGE: Final = (
    "no checkpoints, because the pods share no folder: a failed or suspended attempt starts from the beginning; "
    "set checkpoint.storage"
)
"""Warning of a training whose checkpoints have no storage."""
LATER_FIELDS: Final = "the installed CRD is that of a later release; the operator does not use its fields"
"""Warning of a training with fields that the operator does not know. Their names follow."""
PERMANENT_REFUSALS: Final = ("NameTaken", "Rejected", "KubeRayTooOld")
"""Reasons for which the API server refuses a write every time, until the spec or the cluster changes."""


def new_status(observed: Observed, verdict: Verdict, now: datetime) -> tuple[TrainingStatus, float | None]:
    """Return the status to write, and the seconds until it may be written again only for newer numbers of the trainer.

    The seconds are None if the status contains the newest numbers.
    """
    changed = observed.status.model_copy(update=dict(verdict.changes))
    attempt = attempts.last_attempt(changed.attempts)
    report = None if attempt is None else attempts.report_of(observed, attempt)
    pools = _pools(observed, attempt)
    by_name = {pool.name: pool for pool in pools}
    has_rollout = "rollout" in by_name
    status = changed.model_copy(
        update={
            "observedGeneration": observed.generation,
            "state": verdict.state,
            "retry": observed.status.retry if verdict.state == "Failed" else observed.retry or None,
            "attempts": attempts.bounded(changed.attempts),
            "conditions": conditions(
                _findings(observed, verdict, by_name, now), observed.status, observed.generation, now
            ),
            "pools": pools,
            "progress": observed.status.progress,
            "lastCheckpoint": _checkpoint(observed, report),
            "lastExport": _export(observed, report),
            "rolloutNodes": _rollout_nodes(observed, attempt) if has_rollout else None,
            "rolloutSelector": object_names.rollout_selector(observed.name) if has_rollout else None,
        }
    )
    if report is None or observed.report is None:
        return status, None
    numbers = _numbers(report, rfc3339(observed.report.written or at(report.time)))
    if verdict.state == observed.status.state and not _is_of_earlier_attempt(observed.status.progress, attempt):
        wait = _seconds_until_copy(observed, numbers, now)
        if wait is None or (wait > 0 and status == observed.status):
            return status, wait
    return status.model_copy(update={"progress": numbers}), None


def status_after_refusal(
    observed: Observed, decision: Decision, refused: Sequence[RefusedWrite], now: datetime
) -> TrainingStatus:
    """Return the status after the API server has refused a write of the decision, or several of them.

    If the start of an attempt was refused, the training is Pending, and the status records nothing of the decision.
    Otherwise the status is that of the decision, and the condition Degraded gives the reason of the refusal: an open
    attempt continues, and a training that has ended stays so. A refused deletion or repair does not prevent the start
    of an attempt, and a refused write of the PodDisruptionBudget hides no other reason for which the training is Degraded.
    """
    observed = attempts.with_adopted(observed)
    message = "; ".join(refusal.message for refusal in refused)
    reason = refused[0].reason
    planned = attempts.last_attempt(decision.status.attempts)
    starts = planned is not None and all(attempt.number != planned.number for attempt in observed.status.attempts)
    degraded = true_condition(decision.status, "Degraded") is not None
    if degraded and all(is_of_budget(refusal.write) for refusal in refused):
        return _without_early_numbers(decision.status, observed, now)
    if not starts or all(isinstance(refusal.write, Delete) or is_repair(refusal.write) for refusal in refused):
        return _without_early_numbers(
            _with_condition(decision.status, "Degraded", yes(reason, message), observed, now), observed, now
        )
    accepted = no(reason, message) if reason in PERMANENT_REFUSALS else None
    return new_status(observed, Verdict("Pending", reason, message, accepted=accepted), now)[0]


def _without_early_numbers(status: TrainingStatus, observed: Observed, now: datetime) -> TrainingStatus:
    """Return the status without new numbers of the trainer, if nothing else is new and the interval between copies is not over.

    The decision knew nothing of the refusal, which the old status may contain, and took the numbers along as with any change.
    """
    shown = observed.status.progress
    if shown is None or shown.time is None or seconds_since(shown.time, now) >= progress_interval(observed.running):
        return status
    unchanged = status.model_copy(update={"progress": shown})
    return unchanged if unchanged == observed.status else status


def _with_condition(
    status: TrainingStatus, kind: ConditionType, finding: Finding, observed: Observed, now: datetime
) -> TrainingStatus:
    (changed,) = conditions({kind: finding}, observed.status, observed.generation, now)
    others = [condition for condition in status.conditions if condition.type != kind]
    position = next((at for at, condition in enumerate(status.conditions) if condition.type == kind), len(others))
    return status.model_copy(update={"conditions": (*others[:position], changed, *others[position:])})


def _findings(
    observed: Observed, verdict: Verdict, pools: dict[PodPool, PoolStatus], now: datetime
) -> dict[ConditionType, Finding]:
    state, reason, message = verdict.state, verdict.reason, verdict.message
    ended = state in ("Succeeded", "Failed", "Suspended")
    running = state == "Running" and reason == "Running" and _enough_nodes(observed, pools)
    ready = state in ("Succeeded", "Suspended") or running
    stalled = state == "Failed" or verdict.accepted is not None
    findings: dict[ConditionType, Finding] = {"Accepted": verdict.accepted or yes("Accepted", _advice(observed))}
    if verdict.accepted is None and reason == "Unavailable":
        findings["Accepted"] = Finding("Unknown", reason, message)
    if (quota := _quota(observed, verdict)) is not None:
        findings["QuotaReserved"] = quota
    findings |= _pool_findings(observed, pools, ended=ended)
    findings["Ready"] = (yes if ready else no)(reason, message)
    findings["Suspended"] = yes(reason, message) if state == "Suspended" else no("AsExpected")
    findings["Degraded"] = (
        verdict.degraded or _unrepaired(observed) or disruptions.problem(observed, now) or no("AsExpected")
    )
    if (release := observed.status.release) is not None:
        findings["UpdateAvailable"] = _update(release, final=state in ("Succeeded", "Failed"))
    findings["Succeeded"] = yes(reason, message) if state == "Succeeded" else no("Waiting")
    findings["Failed"] = yes(reason, message) if state == "Failed" else no("AsExpected")
    findings["Reconciling"] = no("AsExpected") if ready or stalled or ended else yes(reason, message)
    findings["Stalled"] = yes(reason, message) if stalled else no("AsExpected")
    return findings


def _unrepaired(observed: Observed) -> Finding | None:
    """Return the problem that children are not as desired because their repairs fail; None without one.

    Children are repaired only while there are pods.
    """
    if not observed.unrepaired or (attempts.open_attempt(observed) is None and not observed.pods):
        return None
    return yes(observed.unrepaired[0][0], "; ".join(message for _, message in observed.unrepaired))


def _update(release: ReleaseStatus, *, final: bool) -> Finding:
    if release.available is None or final:
        return no("AsExpected")
    return yes(
        "NewRelease",
        f"restarts keep {release.image} with Ray {release.rayVersion}; available: {release.available}. To change, suspend and "
        f"resume the training while it runs, or give the annotation {object_names.UPDATE} a new value: then the next attempt changes",
    )


def _advice(observed: Observed) -> str:
    """Return warnings: checkpoints have no storage, the pods could not be sized, or fields were not read.

    An empty text if there are none.
    """
    training = observed.training
    if training is None:
        return ""
    storage = "" if training.spec.checkpoint.storage is not None else NO_STORAGE
    unread = f"{LATER_FIELDS}: {', '.join(training.unknown)}" if training.unknown else ""
    return "; ".join(filter(None, (storage, pod_size.note(training), unread)))


def _pool_findings(
    observed: Observed, pools: dict[PodPool, PoolStatus], *, ended: bool
) -> dict[ConditionType, Finding]:
    kinds: dict[PodPool, ConditionType] = {"head": "ClusterReady", "rollout": "RolloutReady", "train": "TrainReady"}
    findings: dict[ConditionType, Finding] = {}
    for name, kind in kinds.items():
        if (pool := pools.get(name)) is None:
            continue
        needed = _needed_nodes(observed.training, pool)
        if ended or attempts.open_attempt(observed) is None:
            findings[kind] = no("NoAttempt")
        elif pool.ready >= needed > 0:
            findings[kind] = yes("NodesReady", f"{pool.ready} of {pool.desired}")
        else:
            findings[kind] = no("NodesMissing", f"{pool.ready} of {pool.desired}, {pool.unhealthy} unhealthy")
    return findings


def _needed_nodes(training: TrainingResource | None, pool: PoolStatus) -> int:
    """Return the number of nodes that the pool needs for the training to continue."""
    if pool.name != "rollout" or training is None or training.spec.rollout is None:
        return pool.desired
    return (
        pool.desired if training.spec.rollout.minNodes is None else min(pool.desired, training.spec.min_rollout_nodes)
    )


def _enough_nodes(observed: Observed, pools: dict[PodPool, PoolStatus]) -> bool:
    return all(pool.ready >= _needed_nodes(observed.training, pool) for pool in pools.values())


def _quota(observed: Observed, verdict: Verdict) -> Finding | None:
    """Return the condition QuotaReserved; None if the training has no queue.

    Kueue adds the label of a default queue to the RayJob only.
    """
    attempt = attempts.open_attempt(observed)
    job = None if attempt is None else attempts.job_of(observed, attempt.number)
    if job is None:
        labeled = observed.training is not None and QUEUE_LABEL in observed.training.labels
        return no("NoAttempt") if labeled else None
    if not job.queued:
        return None
    return no("QuotaPending", verdict.message) if job.held else yes("QuotaReserved")


def _pools(observed: Observed, attempt: Attempt | None) -> tuple[PoolStatus, ...]:
    """Return the status of each pool that the mode has.

    While the spec cannot be read, return the pools of the old status.
    """
    if observed.training is None:
        return observed.status.pools
    spec = observed.training.spec
    running = attempt is not None and attempt.outcome == "Running"
    rollout_nodes = target(observed.training, observed.status)
    nodes: dict[PodPool, int] = {"head": 1, "rollout": rollout_nodes, "train": spec.train.nodes}
    if spec.mode != "FullyAsync":
        del nodes["rollout"]
    pods = attempts.pods_of(observed, attempt.number) if attempt is not None else ()

    def pool_status(name: PodPool) -> PoolStatus:
        members = [pod for pod in pods if pod.pool == name]
        return PoolStatus(
            name=name,
            desired=nodes[name] if running else 0,
            ready=sum(pod.ready for pod in members),
            unhealthy=sum(bool(pod.reason) for pod in members),
        )

    return tuple(pool_status(name) for name in nodes)


def _rollout_nodes(observed: Observed, attempt: Attempt | None) -> int:
    """Return the number of rollout pods that have not ended, whether they work or not, for the scale subresource.

    If failing pods were left out, an autoscaler would request nodes for them again.
    """
    pods = () if attempt is None else attempts.pods_of(observed, attempt.number)
    return sum(pod.pool == "rollout" and not pod.ended for pod in pods)


def _is_of_earlier_attempt(progress: ProgressStatus | None, attempt: Attempt | None) -> bool:
    """Return whether the numbers in the status were reported before the attempt started. Then even equal ones get a new time."""
    if progress is None or progress.time is None or attempt is None or attempt.startTime is None:
        return False
    return parse(progress.time) < parse(attempt.startTime)


def _seconds_until_copy(observed: Observed, numbers: ProgressStatus, now: datetime) -> float | None:
    """Return the seconds until the status may be written only for these numbers; None if it contains them.

    A write of the status for another reason takes the numbers along: so no checkpoint is newer than they. A process that has just
    begun to lead finds many numbers overdue, and gives each of these trainings a turn.
    """
    shown = observed.status.progress
    if shown is None or shown.time is None:
        return 0.0
    if numbers.model_copy(update={"time": shown.time}) == shown:
        return None  # only the time differs
    age = seconds_since(shown.time, now)
    if age < 0:
        return 0.0
    wait = progress_interval(observed.running) - age
    leading = math.inf if observed.reports_since is None else (now - observed.reports_since).total_seconds()
    if wait > -leading:  # not overdue when this process began to lead
        return max(0.0, wait)
    turn = fraction(observed.uid) * observed.running / MAX_OVERDUE_COPIES_PER_SECOND  # seconds after the start
    return max(0.0, min(turn, turn - leading))


def progress_interval(running: int) -> float:
    """Return the minimum seconds between two writes that only copy a trainer's numbers. running: number of running trainings."""
    return max(MIN_PROGRESS_SECONDS, running / MAX_COPIES_PER_SECOND)


def _numbers(report: ProgressReport, time: str) -> ProgressStatus:
    """Return the report's numbers, rounded so that they fit into kubectl's columns and do not change all the time."""
    counts = ("update", "version", "lagMax")
    measures = {"reward": 4, "accuracy": 4, "heldOutReward": 4, "lagMean": 2, "rolloutIdle": 2, "trainIdle": 2}
    measures |= {"tokensPerSecond": 1, "secondsPerUpdate": 2}
    rounded = {name: getattr(report, name) for name in counts}
    for name, digits in measures.items():
        value = getattr(report, name)
        rounded[name] = None if value is None else round(value, digits)
    totals = Totals(prompts=report.prompts, samples=report.samples, tokens=report.tokens)
    return ProgressStatus(**rounded, totalUpdates=report.updates, totals=totals, time=time)


def _checkpoint(observed: Observed, report: ProgressReport | None) -> LastCheckpoint | None:
    if report is None or report.checkpoint is None:
        return observed.status.lastCheckpoint
    saved = report.checkpoint
    return LastCheckpoint(uri=saved.uri, update=saved.update, time=rfc3339(at(saved.time)))


def _export(observed: Observed, report: ProgressReport | None) -> LastExport | None:
    if report is None or report.export is None:
        return observed.status.lastExport
    return LastExport(uri=report.export.uri, update=report.export.update, time=rfc3339(at(report.export.time)))
