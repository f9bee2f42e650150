"""spec.async: how far generation may run ahead of training."""

from typing import Literal

from pydantic import Field
from pydantic.config import JsonDict

from qwen35_trainer.spec.base import Section

OnMissedDeadline = Literal["Wait", "MaskTokens", "Discard"]

# Stored objects get no default here: what an unwritten knob means depends on spec.mode, and whether it was written
# at all decides what is refused.
BY_MODE: JsonDict = {"x-default-by-mode": True}


class Async(Section):
    """The two knobs of staleness, and the rhythm of publications.

    A batch is promptsPerUpdate × requireBatches prompts and makes requireBatches updates; weights are published every
    updatesPerSync batches. Outside FullyAsync the window is 0: see `TrainingSpec.effective_async`.
    """

    stalenessThreshold: float = Field(
        0.5,
        ge=0,
        le=64,
        json_schema_extra=BY_MODE,
        description="Count knob: groups that may be under way beyond one version's, as a share of those. 0 is "
        "synchronous. 0.5 takes most of the speed-up in verl's tables; 0 outside FullyAsync. "
        "verl: async_training.staleness_threshold.",
    )
    maxVersionLag: int = Field(
        4,
        ge=0,
        le=64,
        json_schema_extra=BY_MODE,
        description="Age knob: oldest weight version, counted back from the one being trained, whose tokens may enter "
        "the loss. 4 keeps accuracy within noise of synchronous training (AReaL); 0 outside FullyAsync. "
        "verl: async_training.max_off_policy_threshold.",
    )
    onMissedDeadline: OnMissedDeadline = Field(
        "Wait",
        json_schema_extra=BY_MODE,
        description="When a group is unfinished at its last legal batch: wait for it, leave too old tokens out of the "
        "loss, or give the prompt back. Wait loses nothing. verl: none (drop or wait).",
    )
    adaptiveDispatch: bool = Field(
        False,
        json_schema_extra=BY_MODE,
        description="Hold prompts back while those under way are predicted to miss their deadlines, and fill up again "
        "when slots stand idle. Off: the two knobs alone decide. verl: none.",
    )
    updatesPerSync: int = Field(
        1,
        ge=1,
        le=1024,
        description="Batches between two weight publications. 1 keeps rollouts freshest. "
        "verl: async_training.trigger_parameter_sync_step.",
    )
    requireBatches: int = Field(
        1,
        ge=1,
        le=1024,
        description="Updates per batch: so many times promptsPerUpdate prompts are collected before training. 1 "
        "starts earliest. verl: async_training.require_batches.",
    )
    partialRollout: bool = Field(
        True,
        json_schema_extra=BY_MODE,
        description="Let unfinished sequences go on across a publication, each token tagged with its version. On: "
        "else long answers hold up every publication; off where nothing runs ahead. "
        "verl: async_training.partial_rollout.",
    )
    stallSeconds: float = Field(
        600.0,
        gt=0,
        le=604_800,
        description="Time without any progress after which the run is called stalled, in seconds. 600 is longer than "
        "any single step of the published recipes. verl: none.",
    )
