"""spec.async: how far generation may run ahead of training."""

from typing import Literal

from pydantic import Field
from pydantic.config import JsonDict

from qwen35_trainer.manifest.base import Section

OnMissedDeadline = Literal["Wait", "MaskTokens", "Discard"]

BY_MODE: JsonDict = {"x-default-by-mode": True}
"""Marks fields whose default depends on spec.mode. The custom resource definition has no default for them, because a
check must know whether the user has set the field."""


class AsyncSpec(Section):
    """Bounds of staleness, and how many batches and updates lie between publications.

    A batch has promptsPerUpdate × updatesPerBatch prompts and makes updatesPerBatch updates; weights are published after
    every batchesPerPublication batches. In other modes than FullyAsync both bounds of staleness are 0, so
    every batch trains on tokens of the newest weights: see `TrainingSpec.effective_async`.
    """

    stalenessThreshold: float = Field(
        0.5,
        ge=0,
        le=64,
        json_schema_extra=BY_MODE,
        description="Staleness by count: how many groups may be in the pipeline beyond those of one version, as a "
        "fraction of them. 0 is synchronous. Default 0.5, which gives most of the speed-up in verl's "
        "tables; 0 outside FullyAsync. verl: async_training.staleness_threshold.",
    )
    maxVersionLag: int = Field(
        4,
        ge=0,
        le=64,
        json_schema_extra=BY_MODE,
        description="Staleness by age: maximum number of weight versions between the one that sampled a token and the"
        " one being trained; older tokens do not enter the loss. Default 4, which keeps accuracy within "
        "noise of synchronous training (AReaL); 0 outside FullyAsync. verl: "
        "async_training.max_off_policy_threshold.",
    )
    onMissedDeadline: OnMissedDeadline = Field(
        "Wait",
        json_schema_extra=BY_MODE,
        description="What to do when a group is unfinished at the last batch in which it may train: wait for it, "
        "exclude the tokens that are too old from the loss, or return the prompt to the data. Default "
        "Wait, which loses nothing. verl: none (drop or wait).",
    )
    adaptiveDispatch: bool = Field(
        False,
        json_schema_extra=BY_MODE,
        description="Dispatch fewer prompts while those in the pipeline are predicted to miss their deadlines, and "
        "more when slots are idle. Default false: only stalenessThreshold and maxVersionLag decide. verl:"
        " none.",
    )
    batchesPerPublication: int = Field(
        1,
        ge=1,
        le=1024,
        description="Batches that train between two publications of the weights. Default 1, which keeps rollouts "
        "freshest. verl: async_training.trigger_parameter_sync_step.",
    )
    updatesPerBatch: int = Field(
        1,
        ge=1,
        le=1024,
        description="Updates (optimizer steps) per batch: a batch collects updatesPerBatch × promptsPerUpdate prompts"
        " before it trains. Default 1, which starts training earliest. verl: "
        "async_training.require_batches.",
    )
    partialRollout: bool = Field(
        True,
        json_schema_extra=BY_MODE,
        description="Let unfinished sequences continue with new weights after a publication; every token records its "
        "version. Default true, because a publication would otherwise wait for the longest answers; false"
        " where nothing runs ahead. verl: async_training.partial_rollout.",
    )
    stallSeconds: float = Field(
        600.0,
        gt=0,
        le=604_800,
        description="Time without progress, in seconds, after which the run counts as stalled, and the time for which it "
        "continues with fewer rollout replicas than rollout.minNodes. Default 600, longer than any step of the published "
        "recipes. verl: none.",
    )
