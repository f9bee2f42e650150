"""Qwen35Training, v1alpha1: the spec is `qwen35_trainer.spec`, the status is what the operator reports.

No phase drives anything: `state` sums up the conditions for people, and everything else is observed.
"""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.spec import TrainingSpec
from qwen35_trainer.spec.base import Section

GROUP = "rl.qwen35.io"
VERSION = "v1alpha1"
KIND = "Qwen35Training"
PLURAL = "qwen35trainings"
SINGULAR = "qwen35training"
SHORT_NAMES = ("q35",)
CATEGORIES = ("rl",)

ConditionStatus = Literal["True", "False", "Unknown"]
State = Literal[
    "Pending", "Queued", "Starting", "Running", "Restarting", "Suspending", "Suspended", "Succeeded", "Failed"
]
Outcome = Literal["Running", "Succeeded", "Suspended", "Failed"]
Time = Annotated[str, Field(min_length=20, max_length=40)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class Condition(Section):
    """One observation about the training, as metav1.Condition."""

    type: str = Field(
        min_length=1,
        max_length=316,
        description="Kind of observation: Accepted, QuotaReserved, ClusterReady, RolloutReady, TrainReady, Ready, "
        "Suspended, Degraded, Succeeded, Failed, Reconciling or Stalled.",
    )
    status: ConditionStatus = Field(description="Whether it holds.")
    observedGeneration: Count | None = Field(None, description="Generation of the object that it was observed for.")
    lastTransitionTime: Time = Field(description="When the status last changed, in RFC 3339.")
    reason: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, as one word for programs.",
    )
    message: str = Field(max_length=32_768, description="Why, for people; names the field, the value and the fix.")


class PoolStatus(Section):
    """The nodes of one pool."""

    name: Literal["head", "rollout", "train"] = Field(description="Which pool.")
    desired: Count = Field(0, description="Nodes that it should have.")
    ready: Count = Field(0, description="Nodes that work.")
    unhealthy: Count = Field(0, description="Nodes that are there and do not work.")


class Totals(Section):
    """What the training has used and made since its first attempt."""

    prompts: Count = Field(0, description="Prompts trained on.")
    samples: Count = Field(0, description="Sequences trained on.")
    tokens: Count = Field(0, description="Response tokens trained on.")


class Progress(Section):
    """Where the training stands, as its driver last reported."""

    update: Count = Field(0, description="Optimizer steps done.")
    updates: Count | None = Field(None, description="Optimizer steps of the whole run.")
    version: Count = Field(0, description="Weight version that rollouts use.")
    totals: Totals | None = Field(None, description="What has been used and made so far.")
    secondsPerUpdate: float | None = Field(None, ge=0, description="Seconds from update to update, of late.")
    reward: float | None = Field(None, description="Mean reward of the last update.")
    accuracy: Share | None = Field(
        None,
        description="Share, 0 to 1, of the held-out responses of the last evaluation to which every reward gives at least "
        "1. Absent while it is 0 and the mean reward is not.",
    )
    heldOutReward: float | None = Field(
        None,
        description="Mean reward of the held-out responses of the last evaluation. Absent where it equals accuracy.",
    )
    lagMean: float | None = Field(None, ge=0, description="Mean age of the last update's tokens, in weight versions.")
    lagMax: Count | None = Field(None, description="Greatest age of a trained token so far, in weight versions.")
    rolloutIdle: Share | None = Field(None, description="Share of time that the rollout pool waited, 0 to 1.")
    trainIdle: Share | None = Field(None, description="Share of time that the train pool waited, 0 to 1.")
    tokensPerSecond: float | None = Field(None, ge=0, description="Tokens generated per second.")
    time: Time | None = Field(None, description="When the driver reported this, in RFC 3339.")


class LastCheckpoint(Section):
    """The newest complete checkpoint: where the next attempt would start."""

    uri: str = Field(min_length=1, max_length=2048, description="Where it is.")
    update: Count = Field(description="Optimizer steps that it holds.")
    time: Time = Field(description="When it was published, in RFC 3339.")


class LastExport(Section):
    """A checkpoint as a Hugging Face folder (spec.checkpoint.export)."""

    uri: str = Field(min_length=1, max_length=2048, description="Where the folder is.")
    update: Count = Field(description="Optimizer steps that it has had.")
    time: Time = Field(description="When it was complete, in RFC 3339.")


class Fault(Section):
    """What went wrong with a pod, kept because the pod is soon replaced."""

    pool: Literal["head", "rollout", "train"] = Field(description="Pool of the pod.")
    pod: str = Field(min_length=1, max_length=253, description="Name of the pod.")
    reason: str = Field(min_length=1, max_length=128, description="OOMKilled, Evicted, Preempted, NodeLost or Error.")
    exitCode: int | None = Field(None, description="Exit code of its Ray container, if it ended.")
    message: str = Field("", max_length=1024, description="What the cluster says about it.")
    time: Time = Field(description="When it was seen, in RFC 3339.")


class AutoscaleStatus(Section):
    """The size that autoscaling has chosen for the rollout pool."""

    nodes: Count = Field(description="Nodes that the pool is to have.")
    reason: str = Field(max_length=1024, description="Why, with the idle shares that it was chosen by.")
    time: Time = Field(description="When, in RFC 3339.")


class Attempt(Section):
    """One RayJob of the training."""

    number: Annotated[int, Field(ge=1)] = Field(description="Counts up from 1.")
    job: str = Field(min_length=1, max_length=253, description="Name of the RayJob.")
    outcome: Outcome = Field(description="How it ended, or Running.")
    counted: bool = Field(False, description="Whether it used up one of failurePolicy.maxRestarts.")
    reason: str | None = Field(None, max_length=128, description="Why it ended, as one word.")
    message: str | None = Field(None, max_length=4096, description="Why it ended, for people.")
    startTime: Time | None = Field(None, description="When it was created, in RFC 3339.")
    endTime: Time | None = Field(None, description="When it ended, in RFC 3339.")
    fault: Fault | None = Field(None, description="The latest fault of one of its pods.")


class TrainingStatus(Section):
    """What the operator has seen; never written by users."""

    observedGeneration: Count | None = Field(None, description="Generation of the object that this status is about.")
    state: State | None = Field(None, description="The conditions in one word, for people; nothing decides by it.")
    conditions: tuple[Condition, ...] = Field(
        (),
        strict=False,
        max_length=32,
        json_schema_extra={"x-kubernetes-list-map-keys": ["type"]},
        description="Observations, one per type.",
    )
    pools: tuple[PoolStatus, ...] = Field((), strict=False, max_length=3, description="Nodes of each pool.")
    progress: Progress | None = Field(None, description="Where the training stands.")
    lastCheckpoint: LastCheckpoint | None = Field(None, description="The newest complete checkpoint.")
    lastExport: LastExport | None = Field(None, description="The newest model that the run has written to take away.")
    attempts: tuple[Attempt, ...] = Field(
        (),
        strict=False,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-map-keys": ["number"]},
        description="RayJobs so far, oldest first; the oldest are dropped beyond 64.",
    )
    restarts: Count = Field(0, description="Attempts that used up one of failurePolicy.maxRestarts.")
    activeSeconds: Count = Field(0, description="Seconds that ended attempts took, for activeDeadlineSeconds.")
    autoscale: AutoscaleStatus | None = Field(None, description="What rollout.autoscale has decided last.")
    rolloutNodes: Count | None = Field(
        None, description="Nodes of the rollout pool that exist, for the scale subresource."
    )
    rolloutSelector: str | None = Field(
        None, max_length=512, description="Label selector of the rollout pool's pods, for the scale subresource."
    )


__all__ = [
    "CATEGORIES",
    "GROUP",
    "KIND",
    "PLURAL",
    "SHORT_NAMES",
    "SINGULAR",
    "VERSION",
    "Attempt",
    "AutoscaleStatus",
    "Condition",
    "Fault",
    "LastCheckpoint",
    "PoolStatus",
    "Progress",
    "Totals",
    "TrainingSpec",
    "TrainingStatus",
]
