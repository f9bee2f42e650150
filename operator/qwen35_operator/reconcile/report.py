"""The status: made anew from what is seen and what was decided; only what must outlast the objects is carried over."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from qwen35_operator.api import v1alpha1
from qwen35_operator.api.training import Training
from qwen35_operator.api.v1alpha1 import Attempt, LastCheckpoint, LastExport, PoolStatus, Totals, TrainingStatus
from qwen35_operator.desired import names
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.actions import Refused
from qwen35_operator.reconcile.decision import Decision
from qwen35_operator.reconcile.elasticity import QUEUE_LABEL, target
from qwen35_operator.reconcile.observed import Observed, Pool
from qwen35_operator.reconcile.verdict import Verdict
from qwen35_operator.status.conditions import Finding, conditions, no, yes
from qwen35_operator.status.times import at, rfc3339, seconds_since
from qwen35_operator.status.vocabulary import ConditionType
from qwen35_trainer.contract import Progress

MIRROR = 10.0
"""Seconds between two copies of the trainer's numbers: each is a write to etcd."""

FINAL: Final = ("NameTaken", "Rejected", "KubeRayTooOld")
"""Refusals that only a change of the spec or the cluster can end."""


def report(seen: Observed, verdict: Verdict, now: datetime) -> tuple[TrainingStatus, float | None]:
    """The status, and in how many seconds newer numbers may be copied; None when they are all there."""
    after = seen.status.model_copy(update=dict(verdict.changes))
    attempt = after.attempts[-1] if after.attempts else None
    pools = _pools(seen, attempt)
    progress, wait = _progress(seen, attempt, verdict, now)
    ready = {pool.name: pool for pool in pools}
    status = after.model_copy(
        update={
            "observedGeneration": seen.generation,
            "state": verdict.state,
            "conditions": conditions(_findings(seen, verdict, ready), seen.status, seen.generation, now),
            "pools": pools,
            "progress": progress,
            "lastCheckpoint": _checkpoint(seen, attempt),
            "lastExport": _export(seen, attempt),
            "rolloutNodes": ready["rollout"].ready if "rollout" in ready else None,
            "rolloutSelector": names.rollout_selector(seen.name) if "rollout" in ready else None,
        }
    )
    return status, wait


def blocked(seen: Observed, decision: Decision, refused: Sequence[Refused], now: datetime) -> TrainingStatus:
    """The status when the API server would not do what was decided.

    A running attempt goes on, degraded. Else nothing of the decision may be taken for done.
    """
    seen = attempts.with_adopted(seen)
    message = "; ".join(one.message for one in refused)
    reason = refused[0].reason
    going = attempts.opened(seen)
    planned = decision.status.attempts
    if going is not None and planned and planned[-1].number == going.number:
        return _with(decision.status, "Degraded", yes(reason, message), seen, now)
    verdict = Verdict("Pending", reason, message, accepted=no(reason, message) if reason in FINAL else None)
    return report(seen, verdict, now)[0]


def _with(
    status: TrainingStatus, kind: ConditionType, finding: Finding, seen: Observed, now: datetime
) -> TrainingStatus:
    (changed,) = conditions({kind: finding}, seen.status, seen.generation, now)
    kept = tuple(changed if one.type == kind else one for one in status.conditions)
    return status.model_copy(update={"conditions": kept})


def _findings(seen: Observed, verdict: Verdict, pools: dict[Pool, PoolStatus]) -> dict[ConditionType, Finding]:
    state, why, said = verdict.state, verdict.reason, verdict.message
    over = state in ("Succeeded", "Failed", "Suspended")
    ready = state in ("Succeeded", "Suspended") or (state == "Running" and why == "Running" and _enough(seen, pools))
    stuck = state == "Failed" or verdict.accepted is not None
    found: dict[ConditionType, Finding] = {"Accepted": verdict.accepted or yes("Accepted", _advice(seen))}
    if verdict.accepted is None and why == "Unavailable":
        found["Accepted"] = Finding("Unknown", why, said)
    if seen.training is not None and QUEUE_LABEL in seen.training.labels:
        found["QuotaReserved"] = _quota(seen, verdict)
    found |= _pool_findings(seen, pools, idle=over)
    found["Ready"] = (yes if ready else no)(why, said)
    found["Suspended"] = yes(why, said) if state == "Suspended" else no("AsExpected")
    found["Degraded"] = verdict.degraded or no("AsExpected")
    found["Succeeded"] = yes(why, said) if state == "Succeeded" else no("Waiting")
    found["Failed"] = yes(why, said) if state == "Failed" else no("AsExpected")
    found["Reconciling"] = no("AsExpected") if ready or stuck or over else yes(why, said)
    found["Stalled"] = yes(why, said) if stuck else no("AsExpected")
    return found


def _advice(seen: Observed) -> str:
    """What can be run, and will be regretted."""
    if seen.training is None or seen.training.spec.checkpoint.storage is not None:
        return ""
    return "no checkpoints, for the pods share no folder: a failed or suspended attempt starts anew; set checkpoint.storage"


def _pool_findings(seen: Observed, pools: dict[Pool, PoolStatus], *, idle: bool) -> dict[ConditionType, Finding]:
    kinds: dict[Pool, ConditionType] = {"head": "ClusterReady", "rollout": "RolloutReady", "train": "TrainReady"}
    found: dict[ConditionType, Finding] = {}
    for name, kind in kinds.items():
        if (pool := pools.get(name)) is None:
            continue
        needed = _needed(seen.training, pool)
        if idle or attempts.opened(seen) is None:
            found[kind] = no("NoAttempt")
        elif pool.ready >= needed > 0:
            found[kind] = yes("NodesReady", f"{pool.ready} of {pool.desired}")
        else:
            found[kind] = no("NodesMissing", f"{pool.ready} of {pool.desired}, {pool.unhealthy} unhealthy")
    return found


def _needed(training: Training | None, pool: PoolStatus) -> int:
    """Nodes that are enough to go on with."""
    if pool.name != "rollout" or training is None or training.spec.rollout is None:
        return pool.desired
    return min(pool.desired, training.spec.rollout.minNodes or pool.desired)


def _enough(seen: Observed, pools: dict[Pool, PoolStatus]) -> bool:
    return all(pool.ready >= _needed(seen.training, pool) for pool in pools.values())


def _quota(seen: Observed, verdict: Verdict) -> Finding:
    attempt = attempts.opened(seen)
    job = None if attempt is None else attempts.job_of(seen, attempt.number)
    if job is None:
        return no("NoAttempt")
    return no("QuotaPending", verdict.message) if job.held else yes("QuotaReserved")


def _pools(seen: Observed, attempt: Attempt | None) -> tuple[PoolStatus, ...]:
    """Head, rollout and train, as far as the mode has them; as they were while the spec cannot be read."""
    if seen.training is None:
        return seen.status.pools
    spec = seen.training.spec
    running = attempt is not None and attempt.outcome == "Running"
    wanted: dict[Pool, int] = {"head": 1, "rollout": target(seen, seen.training), "train": spec.train.nodes}
    if spec.mode != "FullyAsync":
        del wanted["rollout"]
    pods = attempts.pods_of(seen, attempt.number) if attempt is not None else ()

    def pool(name: Pool) -> PoolStatus:
        mine = [pod for pod in pods if pod.pool == name]
        return PoolStatus(
            name=name,
            desired=wanted[name] if running else 0,
            ready=sum(pod.ready for pod in mine),
            unhealthy=sum(bool(pod.reason) for pod in mine),
        )

    return tuple(pool(name) for name in wanted)


def _progress(
    seen: Observed, attempt: Attempt | None, verdict: Verdict, now: datetime
) -> tuple[v1alpha1.Progress | None, float | None]:
    before = seen.status.progress
    report = None if attempt is None else attempts.report_of(seen, attempt)
    if report is None or seen.reported is None:
        return before, None
    numbers = _numbers(report, rfc3339(seen.reported.written or at(report.time)))
    if before is None or before.time is None or verdict.state != seen.status.state:
        return numbers, None
    if numbers.model_copy(update={"time": before.time}) == before:
        return before, None  # a heartbeat is no news
    age = seconds_since(before.time, now)
    return (numbers, None) if age >= MIRROR or age < 0 else (before, MIRROR - age)


def _numbers(report: Progress, time: str) -> v1alpha1.Progress:
    """As people read them: digits that say nothing would fill the columns of kubectl, and be news each time."""
    counts = ("update", "updates", "version", "lagMax")
    measures = {"reward": 4, "accuracy": 4, "heldOutReward": 4, "lagMean": 2, "rolloutIdle": 2, "trainIdle": 2}
    measures |= {"tokensPerSecond": 1, "secondsPerUpdate": 2}
    rounded = {name: getattr(report, name) for name in counts}
    for name, digits in measures.items():
        value = getattr(report, name)
        rounded[name] = None if value is None else round(value, digits)
    totals = Totals(prompts=report.prompts, samples=report.samples, tokens=report.tokens)
    return v1alpha1.Progress(**rounded, totals=totals, time=time)


def _checkpoint(seen: Observed, attempt: Attempt | None) -> LastCheckpoint | None:
    report = None if attempt is None else attempts.report_of(seen, attempt)
    if report is None or report.checkpoint is None:
        return seen.status.lastCheckpoint
    saved = report.checkpoint
    return LastCheckpoint(uri=saved.uri, update=saved.update, time=rfc3339(at(saved.time)))


def _export(seen: Observed, attempt: Attempt | None) -> LastExport | None:
    report = None if attempt is None else attempts.report_of(seen, attempt)
    if report is None or report.export is None:
        return seen.status.lastExport
    return LastExport(uri=report.export.uri, update=report.export.update, time=rfc3339(at(report.export.time)))
