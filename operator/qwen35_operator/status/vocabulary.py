"""Every condition type and every reason: documented API, listed in docs/reference/conditions.md."""

from collections.abc import Mapping
from typing import Final, Literal

type ConditionType = Literal[
    "Accepted",
    "QuotaReserved",
    "ClusterReady",
    "RolloutReady",
    "TrainReady",
    "Ready",
    "Suspended",
    "Degraded",
    "Succeeded",
    "Failed",
    "Reconciling",
    "Stalled",
]

CONDITIONS: Final[Mapping[ConditionType, str]] = {
    "Accepted": "The spec can be run, and the API server took the objects made from it.",
    "QuotaReserved": "The queue that the training's labels name has let the present attempt in. Only with a queue.",
    "ClusterReady": "The head of the present attempt's Ray cluster works.",
    "RolloutReady": "Enough rollout nodes work: rollout.minNodes, or all. Not in mode SFT.",
    "TrainReady": "All train nodes work.",
    "Ready": "What the spec asks for is the case: the training runs, is suspended as asked, or has succeeded.",
    "Suspended": "Suspended: no attempt, no pods.",
    "Degraded": "It goes on, but something is not as it should be; the message says what.",
    "Succeeded": "The trainer has said that the training is complete. Final.",
    "Failed": "The training has failed for good. Final.",
    "Reconciling": "The operator is at work towards what the spec asks for (kstatus).",
    "Stalled": "The operator can do nothing more by itself (kstatus).",
}

REASONS: Final[Mapping[str, str]] = {
    "Accepted": "The spec was read, and its objects exist.",
    "Invalid": "The spec cannot be run; the message lists every problem.",
    "NameTaken": "An object that is not ours has the name of a child. It is never adopted.",
    "Rejected": "The API server refused an object made from the spec.",
    "Forbidden": "The operator lacks a permission, which the message names.",
    "KubeRayMissing": "There is no RayJob kind: KubeRay is not installed.",
    "KubeRayTooOld": "The installed KubeRay does not know a field that is needed.",
    "QuotaExceeded": "A ResourceQuota of the namespace is used up.",
    "Unavailable": "A kind that is needed cannot be watched; nothing is done until it can.",
    "Waiting": "Nothing to say yet.",
    "NoAttempt": "There is no attempt at the moment.",
    "QuotaPending": "The queue has not let the attempt in yet, or has evicted it.",
    "QuotaReserved": "The queue has let the attempt in.",
    "Starting": "Pods are being started.",
    "Running": "The trainer reports that it runs.",
    "NodesReady": "All nodes of the pool work.",
    "NodesMissing": "Nodes of the pool do not work, or are not there yet.",
    "Backoff": "An attempt failed; the next one waits.",
    "Cleaning": "Pods of an earlier attempt are still there.",
    "Stopping": "The trainer was asked to save and stop.",
    "Suspended": "Suspended, as spec.suspend asks.",
    "Succeeded": "The trainer has said so.",
    "DeadlineExceeded": "spec.activeDeadlineSeconds is over.",
    "RestartsExhausted": "failurePolicy.maxRestarts is used up.",
    "FailedByRule": "A rule of the failure policy says that trying again is useless.",
    "PodFault": "A pod failed lately.",
    "ProgressUnreadable": "What the trainer wrote cannot be read.",
    "ClockSkew": "The clock of the head's node is off.",
    "NodesFixedByQueue": "The queue holds the attempt to its size; a new one takes the next attempt.",
    "Cleaned": "The children were deleted, ttlSecondsAfterFinished after the end.",
    "AsExpected": "Nothing of the kind.",
}
