"""Every condition type and reason, and the conditions of a status.

The types and reasons are documented API (docs/reference/conditions.md). Conditions follow metav1.Condition: a status
has one condition per type, and lastTransitionTime changes only if the status of the condition changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from qwen35_operator.api.v1alpha1 import Condition, ConditionStatus, TrainingStatus
from qwen35_operator.status.text_limits import cut
from qwen35_operator.status.times import rfc3339

type ConditionType = Literal[
    "Accepted",
    "QuotaReserved",
    "ClusterReady",
    "RolloutReady",
    "TrainReady",
    "Ready",
    "Suspended",
    "Degraded",
    "UpdateAvailable",
    "Succeeded",
    "Failed",
    "Reconciling",
    "Stalled",
]

CONDITIONS: Final[Mapping[ConditionType, str]] = {
    "Accepted": "The spec can be run, and the API server accepted the objects made from it.",
    "QuotaReserved": "The queue named by the training's labels has admitted the present attempt. Only with a queue.",
    "ClusterReady": "The head of the present attempt's Ray cluster works.",
    "RolloutReady": "Enough rollout nodes work: rollout.minNodes, or all. Only in mode FullyAsync.",
    "TrainReady": "All train nodes work.",
    "Ready": "The cluster matches the spec: the training runs, is suspended as requested, or has succeeded.",
    "Suspended": "The training is suspended: it has no attempt and no pods.",
    "Degraded": "The training is running, but something is wrong; see the message.",
    "UpdateAvailable": "The operator has another trainer image or version of Ray than the training, which keeps its own.",
    "Succeeded": "The trainer has reported that the training is complete. Final.",
    "Failed": "The training has failed. Final, unless the annotation rl.qwen35.io/retry changes.",
    "Reconciling": "The operator is working towards the desired state (kstatus).",
    "Stalled": "The operator cannot make further progress without intervention (kstatus).",
}

REASONS: Final[Mapping[str, str]] = {
    "Accepted": "The spec was read, and its objects exist.",
    "Invalid": "The spec cannot be run; the message lists every problem.",
    "NameTaken": "An object that belongs to another owner has the name of a child. The operator never adopts it.",
    "Rejected": "The API server refused an object made from the spec, or a policy forbids the deletion of the object that the message names.",
    "Forbidden": "The operator lacks the permission that the message names.",
    "KubeRayMissing": "The cluster has no kind RayJob: KubeRay is not installed.",
    "KubeRayTooOld": "The installed KubeRay does not know a required field.",
    "QuotaExceeded": "A ResourceQuota of the namespace is used up.",
    "WriteFailed": "The API server failed to write an object of the training, for example because an admission webhook does not answer; the operator tries again.",
    "Unavailable": "A required kind cannot be watched; the operator changes nothing until it can.",
    "Waiting": "The training has not ended.",
    "NoAttempt": "No attempt is open.",
    "QuotaPending": "The queue has not admitted the attempt yet, or has evicted it.",
    "QuotaReserved": "The queue has admitted the attempt.",
    "Starting": "Pods are starting.",
    "Running": "The trainer reports that it is running.",
    "NodesReady": "All nodes of the pool work.",
    "NodesMissing": "Nodes of the pool do not work or do not exist yet.",
    "Backoff": "An attempt failed; the operator waits before it starts the next one.",
    "ChangedTooOften": "More than three attempts were stopped within an hour by changes of the spec or of spec.suspend; the operator waits before it starts the next one.",
    "Retried": "A changed annotation rl.qwen35.io/retry has the failed training tried again.",
    "Cleaning": "Pods, clusters or RayJobs of an earlier attempt still exist.",
    "PodsNotEnded": "Head or train pods of an earlier attempt may still run, on nodes that do not answer; the message names them, and what to do.",
    "ClusterNotOwned": "A RayCluster that no RayJob of the training owns has the training's label, and the next attempt, or the end of a suspension, waits for it; the message names it, and what to do.",
    "Stopping": "The trainer was asked to save and stop.",
    "Suspended": "The training is suspended, because spec.suspend is true.",
    "Succeeded": "The trainer has reported success.",
    "DeadlineExceeded": "spec.activeDeadlineSeconds is over.",
    "RestartsExhausted": "failurePolicy.maxRestarts is used up, or too many restarts in a row that do not count brought no progress.",
    "FailedByRule": "A rule of the failure policy decided that another attempt is useless.",
    "PodFault": "A pod failed recently.",
    "KubeRayInactive": "KubeRay has not given the RayJob a status for a minute.",
    "ProgressUnreadable": "The trainer's report cannot be read, or is of an attempt that does not exist.",
    "ClockSkew": "The clock of the head's node differs from the API server's.",
    "TrainerWarning": "The trainer reports a problem with which it continues; the message explains it.",
    "NodesFixedByQueue": "The queue holds the attempt at its size; the next attempt gets the new one.",
    "NewRelease": "The operator's release, or its settings, name another trainer image or version of Ray.",
    "Cleaned": "The children were deleted, cleanupSecondsAfterFinished after the end.",
    "AsExpected": "The condition does not apply, and that is normal.",
}

MAX_MESSAGE_BYTES = 4096
"""Maximum length of a condition's message in UTF-8; longer messages are cut.

The schema allows eight times as many characters, but people read the messages, and a status has a dozen of them.
"""


@dataclass(frozen=True)
class Finding:
    """The status, reason and message of a condition, before it gets its type and times."""

    status: ConditionStatus
    reason: str
    message: str = ""


def yes(reason: str, message: str = "") -> Finding:
    return Finding("True", reason, message)


def no(reason: str, message: str = "") -> Finding:
    return Finding("False", reason, message)


def conditions(
    findings: Mapping[ConditionType, Finding], earlier: TrainingStatus, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return a condition for each finding, in the same order.

    earlier: the previous status of the training. A condition with an unchanged status keeps its transition time.
    generation: the generation of the training that was observed.
    """
    before = {condition.type: condition for condition in earlier.conditions}
    return tuple(_condition(kind, finding, before.get(kind), generation, now) for kind, finding in findings.items())


def true_condition(status: TrainingStatus, kind: ConditionType) -> Condition | None:
    """Return the condition of this type if its status is True; None otherwise."""
    matching = (condition for condition in status.conditions if condition.type == kind)
    return next((condition for condition in matching if condition.status == "True"), None)


def _condition(
    kind: ConditionType, finding: Finding, before: Condition | None, generation: int, now: datetime
) -> Condition:
    unchanged = before is not None and before.status == finding.status
    return Condition(
        type=kind,
        status=finding.status,
        observedGeneration=generation,
        lastTransitionTime=before.lastTransitionTime if unchanged and before is not None else rfc3339(now),
        reason=finding.reason,
        message=cut(finding.message, MAX_MESSAGE_BYTES),
    )
