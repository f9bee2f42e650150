"""The models of Qwen35Training, v1alpha1. `qwen35_trainer.manifest` defines the spec, this module the status.

The status is the operator's report. Its field `state` only summarizes the conditions for people. No decision depends on
it.
"""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.manifest.base import Section

GROUP = "rl.qwen35.io"
VERSION = "v1alpha1"
KIND = "Qwen35Training"
PLURAL = "qwen35trainings"
SINGULAR = "qwen35training"
SHORT_NAMES = ("q35",)
CATEGORIES = ("rl",)

PodPool = Literal["head", "rollout", "train"]
ConditionStatus = Literal["True", "False", "Unknown"]
State = Literal[
    "Pending", "Queued", "Starting", "Running", "Restarting", "Suspending", "Suspended", "Succeeded", "Failed"
]
AttemptOutcome = Literal["Running", "Succeeded", "Suspended", "Failed"]
Time = Annotated[str, Field(min_length=20, max_length=40, json_schema_extra={"format": "date-time"})]
StatusShare = Annotated[float, Field(ge=0, le=1)]
StatusCount = Annotated[int, Field(ge=0)]


class Condition(Section):
    """One observation about the training, in the format of metav1.Condition."""

    type: str = Field(
        min_length=1,
        max_length=316,
        description="Kind of observation: Accepted, QuotaReserved, ClusterReady, RolloutReady, TrainReady, Ready, "
        "Suspended, Degraded, UpdateAvailable, Succeeded, Failed, Reconciling or Stalled.",
    )
    status: ConditionStatus = Field(description="Whether the condition holds.")
    observedGeneration: StatusCount | None = Field(
        None, description="Generation of the object for which it was observed."
    )
    lastTransitionTime: Time = Field(description="When the status last changed, in RFC 3339.")
    reason: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Reason for the status, as one word for programs.",
    )
    message: str = Field(
        max_length=32_768, description="Reason for the status, for people; names the field, the value and the fix."
    )


class PoolStatus(Section):
    """The nodes of one pool: how many it should have, and how many work."""

    name: PodPool = Field(description="Name of the pool.")
    desired: StatusCount = Field(0, description="Nodes that the pool should have.")
    ready: StatusCount = Field(0, description="Nodes that work.")
    unhealthy: StatusCount = Field(0, description="Nodes that exist but do not work.")


class Totals(Section):
    """Numbers of prompts, samples and tokens that have been trained on since the first attempt."""

    prompts: StatusCount = Field(0, description="Prompts trained on.")
    samples: StatusCount = Field(0, description="Sequences trained on.")
    tokens: StatusCount = Field(0, description="Response tokens trained on.")


class ProgressStatus(Section):
    """The progress of the training, from its driver's latest report."""

    update: StatusCount = Field(0, description="Optimizer steps done.")
    totalUpdates: StatusCount | None = Field(None, description="Optimizer steps of the whole run.")
    version: StatusCount = Field(0, description="Weight version that rollouts use.")
    totals: Totals | None = Field(None, description="Totals so far.")
    secondsPerUpdate: float | None = Field(None, ge=0, description="Mean duration of recent updates, in seconds.")
    reward: float | None = Field(None, description="Mean reward of the last update.")
    accuracy: StatusShare | None = Field(
        None,
        description="Share, 0 to 1, of the held-out responses of the last evaluation to which every reward gives at least "
        "1. Absent while it is 0 and the mean reward is not.",
    )
    heldOutReward: float | None = Field(
        None,
        description="Mean reward of the held-out responses of the last evaluation. Absent where it equals accuracy.",
    )
    lagMean: float | None = Field(None, ge=0, description="Mean age of the last update's tokens, in weight versions.")
    lagMax: StatusCount | None = Field(None, description="Maximum age of the last update's tokens, in weight versions.")
    rolloutIdle: StatusShare | None = Field(
        None, description="Share of time in which the rollout replicas had no sequence to generate, 0 to 1."
    )
    trainIdle: StatusShare | None = Field(
        None, description="Share of time in which the train pool waited for a batch, 0 to 1."
    )
    tokensPerSecond: float | None = Field(None, ge=0, description="Tokens generated per second.")
    time: Time | None = Field(None, description="When the driver reported this, in RFC 3339.")


class LastCheckpoint(Section):
    """The newest complete checkpoint, from which the next attempt would continue."""

    uri: str = Field(min_length=1, max_length=2048, description="Its folder.")
    update: StatusCount = Field(description="Optimizer steps that it includes.")
    time: Time = Field(description="When it was complete, in RFC 3339.")


class LastExport(Section):
    """The newest checkpoint that was exported as a Hugging Face folder (spec.checkpoint.export)."""

    uri: str = Field(min_length=1, max_length=2048, description="The folder.")
    update: StatusCount = Field(description="Optimizer steps that it includes.")
    time: Time = Field(description="When it was complete, in RFC 3339.")


class Fault(Section):
    """The reason why a pod stopped working, recorded because KubeRay soon replaces the pod."""

    pool: PodPool = Field(description="Pool of the pod.")
    pod: str = Field(min_length=1, max_length=253, description="Name of the pod.")
    reason: str = Field(min_length=1, max_length=128, description="OOMKilled, Evicted, Preempted, NodeLost or Error.")
    exitCode: int | None = Field(None, description="Exit code of its Ray container, if it ended.")
    message: str = Field("", max_length=1024, description="The cluster's message about it.")
    time: Time = Field(description="When it was observed, in RFC 3339.")


class AutoscaleStatus(Section):
    """The size that autoscaling has chosen for the rollout pool."""

    nodes: StatusCount = Field(description="Nodes that the pool should have.")
    specNodes: StatusCount | None = Field(
        None, description="rollout.nodes when the size was chosen. If it is edited, the pool gets the new number."
    )
    reason: str = Field(max_length=1024, description="Reason for the size, with the idle shares of both pools.")
    time: Time = Field(description="When the size was chosen, in RFC 3339.")


class ReleaseStatus(Section):
    """The trainer image and the version of Ray with which the attempts of the training run."""

    attempt: StatusCount = Field(description="Number of the latest attempt, which runs or ran with them.")
    image: str = Field(
        min_length=1,
        max_length=1024,
        description="Image of the pods. By its digest, once the nodes have reported it; restarts then run this very image.",
    )
    reference: str = Field(
        min_length=1, max_length=1024, description="The image as spec.pods.image or the operator's settings named it."
    )
    rayVersion: str = Field(max_length=64, description="Version of Ray in the image.")
    request: str | None = Field(
        None,
        max_length=253,
        description="Value of the annotation rl.qwen35.io/update when image and version were chosen.",
    )
    available: str | None = Field(
        None, max_length=1024, description="What the operator would choose now. Absent if it is the same."
    )


class StopRecord(Section):
    """The order to stop that an open attempt has got."""

    reason: str = Field(max_length=128, description="Why it was ordered to stop, as one word.")
    time: Time = Field(description="When it was ordered to stop, in RFC 3339. checkpoint.graceSeconds count from then.")


class Attempt(Section):
    """One attempt to run the training: its RayJob, and how it ended."""

    number: Annotated[int, Field(ge=1)] = Field(description="Number of the attempt, starting at 1.")
    job: str = Field(min_length=1, max_length=253, description="Name of the RayJob.")
    outcome: AttemptOutcome = Field(description="How the attempt ended, or Running.")
    counted: bool = Field(False, description="Whether it used up one of failurePolicy.maxRestarts.")
    reason: str | None = Field(None, max_length=128, description="Why the attempt ended, as one word.")
    message: str | None = Field(
        None,
        max_length=4096,
        description="Why the attempt ended, for people. In full only for the ten newest attempts, at most 4096 bytes.",
    )
    startTime: Time | None = Field(None, description="When the RayJob was created, in RFC 3339.")
    activeSince: Time | None = Field(
        None,
        description="Since when the attempt is active, in RFC 3339: since its start, or since its queue last admitted it. "
        "Absent while its queue holds it back, and after its end.",
    )
    activeSeconds: StatusCount = Field(
        0,
        description="Seconds for which the attempt was active before activeSince. Time in which a queue holds it back does not count.",
    )
    update: StatusCount | None = Field(None, description="Optimizer steps that were done when the attempt ended.")
    evictions: StatusCount = Field(
        0, description="How often its queue has evicted the attempt, which continues when it is admitted again."
    )
    endTime: Time | None = Field(None, description="When the attempt ended, in RFC 3339.")
    fault: Fault | None = Field(None, description="The latest fault of one of its pods.")
    stop: StopRecord | None = Field(None, description="The order to stop, until the attempt has ended.")


class TrainingStatus(Section):
    """The operator's report about the training; users never write it."""

    observedGeneration: StatusCount | None = Field(
        None, description="Generation of the object that this status describes."
    )
    state: State | None = Field(
        None, description="Summary of the conditions in one word, for people; no decision depends on it."
    )
    conditions: tuple[Condition, ...] = Field(
        (),
        strict=False,
        max_length=32,
        json_schema_extra={"x-kubernetes-list-map-keys": ["type"]},
        description="Observations, one per type.",
    )
    pools: tuple[PoolStatus, ...] = Field((), strict=False, max_length=3, description="Nodes of each pool.")
    progress: ProgressStatus | None = Field(None, description="Progress of the training.")
    lastCheckpoint: LastCheckpoint | None = Field(None, description="The newest complete checkpoint.")
    lastExport: LastExport | None = Field(None, description="The newest exported model.")
    attempts: tuple[Attempt, ...] = Field(
        (),
        strict=False,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-map-keys": ["number"]},
        description="RayJobs so far, oldest first; the oldest are dropped beyond 64.",
    )
    restarts: StatusCount = Field(
        0,
        description="Attempts that used up one of failurePolicy.maxRestarts, since the last attempt that was active for an "
        "hour and got further than those before it.",
    )
    retry: str | None = Field(
        None, max_length=253, description="Value of the annotation rl.qwen35.io/retry that the operator has seen."
    )
    retriedAttempt: StatusCount = Field(
        0, description="Number of the last attempt before a changed annotation had the failed training tried again."
    )
    activeSeconds: StatusCount = Field(
        0,
        description="Seconds for which ended attempts were active, for activeDeadlineSeconds. Time in which a queue holds "
        "an attempt back does not count.",
    )
    release: ReleaseStatus | None = Field(
        None,
        description="Trainer image and version of Ray, which a restart keeps. They change when the training is suspended and "
        "resumed, and at the restart after a new value of the annotation rl.qwen35.io/update.",
    )
    autoscale: AutoscaleStatus | None = Field(None, description="Latest decision of rollout.autoscale.")
    rolloutNodes: StatusCount | None = Field(
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
    "ProgressStatus",
    "ReleaseStatus",
    "Totals",
    "TrainingSpec",
    "TrainingStatus",
]
