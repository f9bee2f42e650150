"""The message in the ConfigMap `<training>-progress`: the trainer's latest report about an attempt."""

from typing import Annotated, Literal

from pydantic import FailFast, Field

from qwen35_trainer.contract.message import ContractMessage, parse
from qwen35_trainer.contract.shared_names import PROGRESS_KEY

type AttemptState = Literal["Running", "Succeeded", "Stopped", "Failed"]

ReportedCount = Annotated[int, Field(ge=0, lt=2**63)]
ReportedShare = Annotated[float, Field(ge=0, le=1)]
ReportedSeconds = Annotated[float, Field(ge=0)]
ReportedTime = Annotated[float, Field(ge=0, le=253_402_300_799)]
"""Unix time in seconds, at most that of the end of the year 9999: no status can contain a later one."""


class CheckpointReport(ContractMessage):
    """A complete checkpoint or a complete export, as the trainer reports it to the operator."""

    uri: Annotated[str, Field(min_length=1, max_length=2048)]
    update: ReportedCount
    time: ReportedTime
    """Unix time at which the checkpoint or the export became complete."""


class ReplicaReport(ContractMessage):
    """The pods of one rollout replica, and the share of time in which the replica was idle.

    When the pool shrinks, the operator first removes the pods of the replicas with the largest share of idle time.
    """

    pods: Annotated[tuple[str, ...], FailFast(), Field(strict=False, max_length=64)]
    idle: ReportedShare
    drained: bool | None = None
    """Whether the replica is in pods that leave, holds no sequences and gets none. The operator then removes its pods.

    None: the trainer is of a release that does not report this.
    """


class ProgressReport(ContractMessage):
    """The trainer's report about one attempt. Times are Unix times of the driver's clock, in seconds."""

    attempt: Annotated[int, Field(ge=1)]
    """Number of the attempt that reports. A report with another number describes an earlier attempt and is ignored."""
    state: AttemptState
    """Running, or how the attempt ended. Only a report with the state Succeeded makes an attempt a success."""
    time: ReportedTime
    """Unix time of this report."""
    stopAcknowledged: str | None = None
    """`StopOrder.id` of the order that the driver is carrying out or, in state Stopped, has carried out.

    None: no order has arrived.
    """
    reason: Annotated[str, Field(max_length=128)] | None = None
    """Why the attempt failed: the value of a `FailureReason`. A reader of an older release may not know the value.

    None: the attempt has not failed.
    """
    message: Annotated[str, Field(max_length=4096)] = ""
    """Explanation, for people, of how the attempt ended. Empty while the attempt runs."""
    head: Annotated[str, Field(max_length=253)] | None = None
    """Name of the driver's pod; None outside Kubernetes. If the training has a head pod of
    another name, the driver has ended."""
    cluster: Annotated[str, Field(max_length=253)] | None = None
    """Name of the RayCluster in which the driver runs; None outside a RayCluster. An attempt gets another
    RayCluster each time its queue admits it again. A report with the name of an earlier RayCluster describes a
    driver that an eviction has ended."""
    warning: Annotated[str, Field(max_length=1024)] = ""
    """A problem with which the attempt continues, explained for people. Empty if the trainer knows of none."""
    phase: Annotated[str, Field(max_length=256)] = ""
    """Activity of the driver, such as "loading the model" or "training"."""
    update: ReportedCount = 0
    updates: ReportedCount | None = None
    version: ReportedCount = 0
    versionTime: ReportedTime | None = None
    """Unix time of the latest publication of weights; None until this attempt has published."""
    versionSeconds: ReportedSeconds | None = None
    """Median seconds between the latest versions of the weights; None until three versions exist."""
    prompts: ReportedCount = 0
    samples: ReportedCount = 0
    tokens: ReportedCount = 0
    secondsPerUpdate: ReportedSeconds | None = None
    """Mean seconds of the latest updates; None until three updates have ended."""
    reward: float | None = None
    accuracy: ReportedShare | None = None
    """Share, 0 to 1, of the held-out responses in the latest evaluation to which every reward with a weight above 0 gave
    at least 1.

    None before the first evaluation, and in mode SFT. With graded rewards also None as long as the share
    is 0 while the mean reward is not.
    """
    heldOutReward: float | None = None
    """Mean reward of the held-out responses in the latest evaluation. None if it equals `accuracy`, before the first
    evaluation, and in SFT."""
    lagMean: Annotated[float, Field(ge=0)] | None = None
    lagMax: ReportedCount | None = None
    rolloutIdle: ReportedShare | None = None
    trainIdle: ReportedShare | None = None
    tokensPerSecond: Annotated[float, Field(ge=0)] | None = None
    checkpoint: CheckpointReport | None = None
    export: CheckpointReport | None = None
    """The newest export: `uri` is the path of the Hugging Face folder, and `update` is the number of the exported
    checkpoint's update. None: no export has completed."""
    # FailFast: a list of 100,000 wrong items would be 100,000 errors, of 200 MB.
    replicas: Annotated[tuple[ReplicaReport, ...], FailFast(), Field(strict=False, max_length=1024)] = ()


def parse_progress(text: str | bytes) -> ProgressReport:
    """Parse the trainer's report from the JSON text in the `-progress` ConfigMap.

    Raises ContractError if the text is not valid.
    """
    return parse(ProgressReport, text, PROGRESS_KEY)
