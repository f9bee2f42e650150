"""Decides what follows a failed attempt. The user's rules are tried in order, then the built-in rules.

evidence (report, pods, RayJob) ──► first rule that matches a piece of it ──► Restart | RestartAndIgnoreMaxRestarts | Fail
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.kube.object_records import Pod
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.status.times import seconds_since
from qwen35_trainer.contract import FailureReason
from qwen35_trainer.contract.retry import backoff_seconds
from qwen35_trainer.manifest.failure import FailureAction, FailureRuleSpec
from qwen35_trainer.manifest.rule_pattern import PatternRefused, rule_pattern

RECENT_FAULT_SECONDS = 600.0
"""Maximum age of a pod's fault that counts as evidence.

KubeRay fails a RayJob up to 300 s after its head is gone. An attempt that fails much later has survived the fault.
"""
MAX_BACKOFF_SECONDS = 3600.0
QUICK_FAILURES, MIN_LATE_BACKOFF_SECONDS = 5, 10.0
"""Number of failures in a row after which failurePolicy.backoffSeconds no longer decides alone, and the minimum wait from then on."""
MAX_SEARCHED_CHARACTERS = 4096
"""Number of characters of a message that the regular expression of a rule searches. Trainers send no longer messages."""
MAX_SEARCH_STEPS = 1 << 20
"""Maximum number of steps of one rule's regular expression in one decision: its instructions × the searched characters.

They take about 10 ms, in which the operator works on no other training. A usual expression has up to 100 instructions, and
then searches 10,000 characters. A larger one searches less of the messages.
"""

FAULTS: Final = ("OOMKilled", "Evicted", "Preempted", "NodeLost", "Error")
"""Values of `Pod.reason` for pods that have ended.

The status records such a fault, because KubeRay soon replaces the pod. A pod with any other reason, for example
ImagePullBackOff or Unschedulable, may still start. The attempt is then Degraded and waits, at most until
activeDeadlineSeconds.
"""
PREEMPTIONS: Final = ("Preempted", "Evicted")
LOSSES: Final = (*PREEMPTIONS, "OOMKilled", "NodeLost")
"""Faults by which the cluster ends a pod, whatever the trainer does. Each can be the cause of a symptom (SYMPTOMS)."""
SYMPTOMS: Final = ("Interrupted", "Stalled", "DriverLost", "WorkerLost", "UnexpectedError", "TrainerFailed")
"""Reasons in the trainer's report that can result from the loss of a pod. Any other reason is itself the cause."""
NOT_RETRYABLE: Final = tuple(reason for reason in FailureReason if not reason.retryable)
"""Reasons in the trainer's report that would also end the next attempt."""
OUT_OF_MEMORY: Final = ("OOMKilled", FailureReason.OUT_OF_MEMORY)
"""Reasons for a lack of memory.

Either Kubernetes killed a container, or the trainer reports that a process was killed or that an accelerator has no
memory left.
"""


@dataclass(frozen=True)
class Evidence:
    """One observation about a failed attempt, such as the exit code of a pod. Rules match observations.

    pool: the pool of the pod that was observed. exit_code: the exit code of the pod. Each is None if it is unknown.
    """

    reason: str
    message: str = ""
    pool: PodPool | None = None
    exit_code: int | None = None
    trained: bool = True
    """Whether the training had completed an update before the attempt failed."""


@dataclass(frozen=True)
class BuiltInRule:
    """A built-in rule for failed attempts. It is tried after the user's rules.

    A field that is empty or False matches any evidence. before_training: match only if the training had not completed
    an update before the attempt failed.
    """

    name: str
    action: FailureAction
    reasons: tuple[str, ...] = ()
    pools: tuple[PodPool, ...] = ()
    before_training: bool = False


BUILT_IN: Final = (
    BuiltInRule("preempted", "RestartAndIgnoreMaxRestarts", PREEMPTIONS),
    BuiltInRule("superseded", "RestartAndIgnoreMaxRestarts", (FailureReason.SUPERSEDED,)),
    BuiltInRule("not-retryable", "Fail", NOT_RETRYABLE),
    BuiltInRule("invalid-job", "Fail", ("ValidationFailed",)),
    BuiltInRule("out-of-memory-at-start", "Fail", OUT_OF_MEMORY, ("head", "train"), before_training=True),
    BuiltInRule("node-lost", "Restart", ("NodeLost",)),
    BuiltInRule("out-of-memory", "Restart", OUT_OF_MEMORY),
    BuiltInRule("anything-else", "Restart"),
)


@dataclass(frozen=True)
class RuleDecision:
    """The action and the name of the rule that matched first, and the evidence that the rule matched."""

    action: FailureAction
    rule: str
    evidence: Evidence


def apply_rules(rules: Sequence[FailureRuleSpec], evidence: Sequence[Evidence]) -> RuleDecision:
    """Return the decision of the first rule that matches. `evidence` must not be empty.

    The user's rules come first, in their order. Each is tried on all pieces of evidence before the next rule. The
    built-in rules are tried only on the first piece, which is the cause.
    """
    for rule in rules:
        if (match := _first_match(rule, evidence)) is not None:
            return RuleDecision(rule.action, rule.name, match)
    cause = evidence[0]
    built_in = next(rule for rule in BUILT_IN if _matches_built_in(rule, cause))  # the last one matches everything
    return RuleDecision(built_in.action, built_in.name, cause)


def evidence(situation: AttemptSituation, first: Evidence | None = None) -> list[Evidence]:
    """Return everything that is known about a failed attempt, in the order of causality.

    first: evidence that the caller has found; it precedes the trainer's report. If the trainer reports a failure whose
    reason is not a symptom (SYMPTOMS), the order is: `first`, the report, the pods, the RayJob. For example, the report
    of bad data precedes a pod that was evicted some minutes earlier. Otherwise the order is: pods that the cluster has
    ended (LOSSES), `first`, the report, other pods, the RayJob. Among the pods that the cluster has ended, rollout pods
    are last, because an attempt can outlive them.
    """
    report, progress, job = situation.report, situation.status.progress, situation.job
    trained = bool(report and report.update) or bool(progress and progress.update)
    reported = [] if first is None else [first]
    if report is not None and report.state in ("Failed", "Stopped"):
        reason = report.reason or ("Interrupted" if report.state == "Stopped" else "TrainerFailed")
        reported.append(Evidence(reason, report.message, "head", trained=trained))
    pods = [
        Evidence(pod.reason, f"pod {pod.name}: {pod.message}", pod.pool, pod.exit_code, trained)
        for pod in failing_pods(situation)
    ]
    fault = situation.attempt.fault
    if fault is not None and seconds_since(fault.time, situation.now) < RECENT_FAULT_SECONDS:
        message = f"pod {fault.pod}: {fault.message}"
        pods.append(Evidence(fault.reason, message, fault.pool, fault.exitCode, trained))
    jobs = []
    if job is not None and (job.reason or job.message):
        jobs.append(Evidence(job.reason or job.status or job.deployment, job.message, trained=trained))
    if report is not None and report.state == "Failed" and report.reason is not None and report.reason not in SYMPTOMS:
        return [*reported, *pods, *jobs]
    lost = sorted((pod for pod in pods if pod.reason in LOSSES), key=lambda pod: pod.pool == "rollout")
    return [*lost, *reported, *(pod for pod in pods if pod.reason not in LOSSES), *jobs]


def failing_pods(situation: AttemptSituation) -> list[Pod]:
    """Return the pods of the attempt's present cluster that do not work, including pods that are being deleted."""
    return [pod for pod in attempts.present_pods_of(situation.observed, situation.attempt.number) if pod.reason]


def backoff(seconds: float, failures: int) -> float:
    """Return the seconds to wait before the next attempt: `seconds`, doubled with each failure in a row after the first.

    The result is at most an hour, or `seconds` if that is longer. After more than QUICK_FAILURES it is at least MIN_LATE_BACKOFF_SECONDS,
    doubled in the same way: 0 does not grow, and each attempt creates a cluster. failures: number of the latest attempts that failed in
    a row (`attempts.failures_in_a_row` returns them).
    """
    wait = backoff_seconds(failures, first=seconds, maximum=max(seconds, MAX_BACKOFF_SECONDS))
    if failures <= QUICK_FAILURES:
        return wait
    return max(
        wait,
        backoff_seconds(failures - QUICK_FAILURES, first=MIN_LATE_BACKOFF_SECONDS, maximum=MAX_BACKOFF_SECONDS),
    )


def _first_match(rule: FailureRuleSpec, evidence: Sequence[Evidence]) -> Evidence | None:
    """Return the first piece of evidence that a user's rule matches; None if there is none."""
    candidates = (piece for piece in evidence if _matches_fields(rule, piece))
    if rule.onMessagePattern is None:
        return next(candidates, None)
    try:
        pattern = rule_pattern(rule.onMessagePattern)
    except PatternRefused:  # only trainings that an earlier release has accepted have such an expression
        return None
    remaining = MAX_SEARCH_STEPS // pattern.size
    for piece in candidates:
        text = piece.message[: min(MAX_SEARCHED_CHARACTERS, remaining)]
        remaining -= len(text)
        if pattern.is_found(text):
            return piece
    return None


def _matches_fields(rule: FailureRuleSpec, piece: Evidence) -> bool:
    """Return whether a rule matches a piece of evidence, apart from the message."""
    return (
        (rule.onPool is None or rule.onPool == piece.pool)
        and (not rule.onExitCodes or piece.exit_code in rule.onExitCodes)
        and (not rule.onReasons or piece.reason in rule.onReasons)
    )


def _matches_built_in(rule: BuiltInRule, piece: Evidence) -> bool:
    return (
        (not rule.reasons or piece.reason in rule.reasons)
        and (not rule.pools or piece.pool in rule.pools or piece.pool is None)
        and not (rule.before_training and piece.trained)
    )
