"""Why an attempt failed, and what follows: ordered rules, the user's before the built-in ones.

evidence (report, pods, RayJob) ──► first rule that one piece of evidence matches ──► Restart | RestartWithoutCounting | Fail
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from qwen35_operator.api.v1alpha1 import Attempt
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.observed import Observed, Pod, Pool
from qwen35_operator.status.times import seconds_since
from qwen35_trainer.spec.failure import FailureAction, FailureRule

RECENT = 600.0
"""Seconds: KubeRay fails a RayJob up to 300 s after its head is gone; an older fault has been survived."""
LONGEST_BACKOFF = 3600.0
"""Seconds: doubling ends here."""

FAULTS: Final = ("OOMKilled", "Evicted", "Preempted", "NodeLost", "Error")
"""What ends a pod. KubeRay replaces it, and the reason goes with it; others, such as ImagePullBackOff, may pass."""
PREEMPTED: Final = ("Preempted", "Evicted")
REFUSED: Final = ("ManifestError", "DataError", "FolderRefused", "BoundBroken", "RewardFailed", "RewardSetupError")
"""The trainer's words for what a second try cannot change: bad input, or a bug."""


@dataclass(frozen=True)
class Evidence:
    """One thing that was seen of the failure."""

    reason: str
    message: str = ""
    pool: Pool | None = None
    exit_code: int | None = None
    trained: bool = True
    """Whether the training had done an update before."""


@dataclass(frozen=True)
class BuiltIn:
    """A rule of the operator's own; what is None or empty matches anything."""

    name: str
    action: FailureAction
    reasons: tuple[str, ...] = ()
    pools: tuple[Pool, ...] = ()
    before_training: bool = False


BUILT_IN: Final = (
    BuiltIn("preempted", "RestartWithoutCounting", PREEMPTED),
    BuiltIn("refused-input", "Fail", REFUSED),
    BuiltIn("invalid-job", "Fail", ("ValidationFailed",)),
    BuiltIn(
        "out-of-memory-at-start", "Fail", ("OOMKilled", "OutOfMemoryError"), ("head", "train"), before_training=True
    ),
    BuiltIn("node-lost", "Restart", ("NodeLost",)),
    BuiltIn("out-of-memory", "Restart", ("OOMKilled", "OutOfMemoryError")),
    BuiltIn("anything-else", "Restart"),
)


@dataclass(frozen=True)
class Judgement:
    """The rule that decided, and by which evidence."""

    action: FailureAction
    rule: str
    evidence: Evidence


def judge(rules: Sequence[FailureRule], found: Sequence[Evidence]) -> Judgement:
    """The first rule that matches a piece of evidence. `found` is not empty; earlier pieces explain better."""
    for rule in rules:
        if (match := next((piece for piece in found if _matches(rule, piece)), None)) is not None:
            return Judgement(rule.action, rule.name, match)
    for own in BUILT_IN:
        if (match := next((piece for piece in found if _matches_own(own, piece)), None)) is not None:
            return Judgement(own.action, own.name, match)
    raise AssertionError("the last built-in rule matches everything")


def evidence(seen: Observed, attempt: Attempt, now: datetime, first: Evidence | None = None) -> list[Evidence]:
    """What is known about a failed attempt: what was found first, the trainer's words, its pods, its RayJob."""
    report = attempts.report_of(seen, attempt)
    trained = bool(report and report.update) or bool(seen.status.progress and seen.status.progress.update)
    found = [] if first is None else [first]
    if report is not None and report.state in ("Failed", "Stopped"):
        reason = report.reason or ("Interrupted" if report.state == "Stopped" else "TrainerFailed")
        found.append(Evidence(reason, report.message, "head", trained=trained))
    found += [
        Evidence(pod.reason, f"pod {pod.name}: {pod.message}", pod.pool, pod.exit_code, trained)
        for pod in faulty(seen, attempt)
    ]
    fault = attempt.fault
    if fault is not None and seconds_since(fault.time, now) < RECENT:
        message = f"pod {fault.pod}: {fault.message}"
        found.append(Evidence(fault.reason, message, fault.pool, fault.exitCode, trained))
    if (job := attempts.job_of(seen, attempt.number)) is not None and (job.reason or job.message):
        found.append(Evidence(job.reason or job.status or job.deployment, job.message, trained=trained))
    return found


def faulty(seen: Observed, attempt: Attempt) -> list[Pod]:
    """The pods of the attempt's present cluster that say why they do not work, those among them that are being removed for it."""
    cluster = attempts.cluster_of(seen, attempt.number)
    pods = [pod for pod in seen.pods if pod.attempt == attempt.number and pod.reason]
    return pods if cluster is None else [pod for pod in pods if pod.created >= cluster.created]


def backoff(seconds: float, restarts: int) -> float:
    """Wait before the next attempt after so many counted ones: doubled each time."""
    return min(seconds * 2.0 ** min(max(restarts - 1, 0), 32), max(seconds, LONGEST_BACKOFF))


def _matches(rule: FailureRule, piece: Evidence) -> bool:
    return (
        (rule.pool is None or rule.pool == piece.pool)
        and (not rule.exitCodes or piece.exit_code in rule.exitCodes)
        and (not rule.reasons or piece.reason in rule.reasons)
        and (rule.messagePattern is None or re.search(rule.messagePattern, piece.message) is not None)
    )


def _matches_own(rule: BuiltIn, piece: Evidence) -> bool:
    return (
        (not rule.reasons or piece.reason in rule.reasons)
        and (not rule.pools or piece.pool in rule.pools or piece.pool is None)
        and not (rule.before_training and piece.trained)
    )
