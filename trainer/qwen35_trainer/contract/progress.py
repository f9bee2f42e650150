"""`-progress`: where an attempt stands, as its driver last reported."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.contract.document import Message, parse
from qwen35_trainer.contract.names import PROGRESS_KEY

type AttemptState = Literal["Running", "Succeeded", "Stopped", "Failed"]

Count = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]


class CheckpointReport(Message):
    """A complete checkpoint."""

    uri: Annotated[str, Field(min_length=1, max_length=2048)]
    update: Count
    time: Seconds
    """Unix time at which it was published."""


class Replica(Message):
    """One rollout replica, for choosing which nodes go first."""

    pods: Annotated[tuple[str, ...], Field(strict=False, max_length=64)]
    idle: Share


class Progress(Message):
    """One report. Times are Unix seconds of the driver's clock."""

    attempt: Annotated[int, Field(ge=1)]
    """Which attempt reports: what an earlier one said last is no news of this one."""
    state: AttemptState
    """Running, or how the attempt ended. Success is said here and nowhere else."""
    time: Seconds
    """When this was reported."""
    stopAcknowledged: str | None = None
    """The `Stop.id` that the driver is carrying out, or has carried out when the state is Stopped."""
    reason: Annotated[str, Field(max_length=128)] | None = None
    """Why the attempt failed, as one word: the class of the error."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, for people."""
    head: Annotated[str, Field(max_length=253)] | None = None
    """The driver's pod. Another head in its place means that the driver is gone; None outside a pod."""
    phase: Annotated[str, Field(max_length=256)] = ""
    """What the driver is doing: "loading the model", "training"."""
    update: Count = 0
    updates: Count | None = None
    version: Count = 0
    versionTime: Seconds | None = None
    """When this version was published."""
    versionSeconds: Seconds | None = None
    """Median time between the latest versions; None until there are three."""
    prompts: Count = 0
    samples: Count = 0
    tokens: Count = 0
    secondsPerUpdate: Seconds | None = None
    """Mean over the latest updates; None until there are three."""
    reward: float | None = None
    accuracy: Share | None = None
    """Share of the held-out prompts that the latest evaluation found answered well."""
    heldOutReward: float | None = None
    """Mean reward of the held-out responses of the latest evaluation; None where it equals `accuracy`."""
    lagMean: Annotated[float, Field(ge=0)] | None = None
    lagMax: Count | None = None
    rolloutIdle: Share | None = None
    trainIdle: Share | None = None
    tokensPerSecond: Annotated[float, Field(ge=0)] | None = None
    checkpoint: CheckpointReport | None = None
    export: CheckpointReport | None = None
    """The newest checkpoint that was written as a Hugging Face folder, and where that is."""
    replicas: Annotated[tuple[Replica, ...], Field(strict=False, max_length=1024)] = ()


def parse_progress(text: str) -> Progress:
    """The report in the key's value. Raises ContractError."""
    return parse(Progress, text, PROGRESS_KEY)
