"""Names that fields and values had in earlier versions of v1alpha1, so that errors can give the present names.

Nothing is converted: a manifest with an earlier name is refused, and the message says what to write.
"""

from collections.abc import Sequence
from typing import Final

FIELDS: Final = {
    "accelerator.perNode": "accelerator.devicesPerNode",
    "async.requireBatches": "async.updatesPerBatch",
    "async.updatesPerSync": "async.batchesPerPublication",
    "failurePolicy.rules[].exitCodes": "failurePolicy.rules[].onExitCodes",
    "failurePolicy.rules[].messagePattern": "failurePolicy.rules[].onMessagePattern",
    "failurePolicy.rules[].pool": "failurePolicy.rules[].onPool",
    "failurePolicy.rules[].reasons": "failurePolicy.rules[].onReasons",
    "pods.environment": "pods.env",
    "pods.env[].secret": "pods.env[].valueFrom.secretKeyRef",
    "rollout.autoscale.growAbove": "rollout.autoscale.growAboveTrainIdle",
    "rollout.autoscale.shrinkAbove": "rollout.autoscale.shrinkAboveRolloutIdle",
    "rollout.lane": "rollout.stragglerLane",
    "rollout.maxSequences": "rollout.maxSequencesPerReplica",
    "train.batch.dynamic": "train.batch.dynamicMicroBatches",
    "train.batch.microBatchPerDevice": "train.batch.microBatchSequences",
    "train.parallelism.replicas": "train.parallelism.copies",
    "ttlSecondsAfterFinished": "cleanupSecondsAfterFinished",
    "weights": "publication",
}
"""Earlier path of a field of the spec → present path. `[]` stands for an index."""
VALUES: Final = {
    "nvidia": "NVIDIA",
    "ascend": "Ascend",
    "cpu": "CPU",
    "RestartWithoutCounting": "RestartAndIgnoreMaxRestarts",
}
"""Earlier value of an enumeration → present value."""


def field(path: Sequence[str | int]) -> str | None:
    """Return the present path of a field that was at `path` in an earlier version; None if no field was renamed from `path`."""
    names = ["[]" if isinstance(segment, int) else f".{segment}" for segment in path]
    return FIELDS.get("".join(names).lstrip("."))
