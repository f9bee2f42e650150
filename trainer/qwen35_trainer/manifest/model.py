"""spec.model: the weights that the run starts from."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import PathName, PersistentVolumeClaimSpec, Section

Precision = Literal["BF16", "FP32"]


class RandomVisionSpec(Section):
    """A vision tower with random weights, which makes the model a vision-language one."""

    depth: int = Field(
        2,
        ge=1,
        le=64,
        description="Number of blocks of the tower. Default 2, the minimum with an inner block. verl: none.",
    )
    heads: int = Field(
        2,
        ge=1,
        le=64,
        description="Number of attention heads of a block. Default 2, the minimum that can be sharded. verl: none.",
    )
    headDim: int = Field(
        16,
        ge=4,
        le=256,
        multiple_of=4,
        description="Channels per head; the width of the tower is heads × headDim. A multiple of 4, because row and "
        "column positions each rotate half of the channels, in pairs. Default 16, to stay small. verl: "
        "none.",
    )
    intermediateSize: int = Field(
        64,
        ge=8,
        le=16384,
        description="Width of the MLP in a block. Default 64, which is 2 × heads × headDim. verl: none.",
    )
    patchSize: int = Field(
        4,
        ge=1,
        le=64,
        description="Side of a patch, in pixels. Default 4, so that an image of 8 × 8 pixels is one token; published "
        "checkpoints have 16. verl: none.",
    )
    temporalPatchSize: int = Field(
        2, ge=1, le=8, description="Video frames per patch. Default 2, as in the published checkpoints. verl: none."
    )
    spatialMergeSize: int = Field(
        2,
        ge=1,
        le=8,
        description="Patches per side that are merged into one token. Default 2, as in the published checkpoints: 2 ×"
        " 2 patches become one token. verl: none.",
    )
    positionGrid: int = Field(
        8,
        ge=2,
        le=256,
        description="Side of the learned grid of positions, which is interpolated to the size of each image. Default "
        "8, which holds images of 32 × 32 pixels without interpolation. verl: none.",
    )


SPECIAL_TOKENS, VISION_TOKENS = 3, 4
"""Numbers of special tokens of a random model: in every model, and in addition in a model with a vision tower."""


class RandomModelSpec(Section):
    """A Qwen3.5 model with random weights and one token per character: the real architecture without a download."""

    hiddenSize: int = Field(
        64,
        ge=8,
        le=8192,
        description="Width of the residual stream. Default 64, which trains on one CPU core. verl: none.",
    )
    intermediateSize: int = Field(
        128,
        ge=8,
        le=32768,
        description="Width of the MLP, or of each expert. Default 128, which is 2 × hiddenSize. verl: none.",
    )
    layers: int = Field(
        4, ge=1, le=128, description="Number of decoder layers. Default 4, one full pattern of layer kinds. verl: none."
    )
    fullAttentionInterval: int = Field(
        4,
        ge=1,
        le=128,
        description="Every n-th layer has full attention; the others are Gated DeltaNet layers. Default 4, as in the "
        "published checkpoints. verl: none.",
    )
    attentionHeads: int = Field(
        4,
        ge=1,
        le=128,
        description="Query heads of a full-attention layer. Default 4: 4 × headDim is hiddenSize. verl: none.",
    )
    keyValueHeads: int = Field(
        2,
        ge=1,
        le=128,
        description="Key and value heads of a full-attention layer; divides attentionHeads. Default 2, so that query "
        "heads share them in groups. verl: none.",
    )
    headDim: int = Field(
        16,
        ge=4,
        le=512,
        description="Channels per attention head. Default 16: small, with room for partial rotary embeddings. verl: "
        "none.",
    )
    linearKeyHeads: int = Field(
        2,
        ge=1,
        le=128,
        description="Key heads of a Gated DeltaNet layer. Default 2, the minimum that can be sharded. verl: none.",
    )
    linearValueHeads: int = Field(
        2,
        ge=1,
        le=128,
        description="Value heads of a Gated DeltaNet layer; a multiple of linearKeyHeads. Default 2, equal to "
        "linearKeyHeads. verl: none.",
    )
    linearHeadDim: int = Field(
        16, ge=4, le=512, description="Channels per head of a Gated DeltaNet layer. Default 16, as headDim. verl: none."
    )
    experts: int = Field(
        0, ge=0, le=1024, description="Experts per layer; 0 is a dense MLP. Default 0, the fastest. verl: none."
    )
    expertsPerToken: int = Field(
        2,
        ge=1,
        le=64,
        description="Experts that each token is routed to. Default 2, so that routing weights matter. verl: none.",
    )
    initializerRange: float = Field(
        0.06,
        gt=0,
        le=1,
        description="Standard deviation of the initial weights. Default 0.06, with which so narrow a model learns "
        "within dozens of updates. verl: none.",
    )
    tieEmbeddings: bool = Field(
        False,
        description="Share the input embedding with the output layer. Default false, as in large checkpoints. verl: "
        "none.",
    )
    characters: str = Field(
        "0123456789+-=<>, abcdefghijklmnopqrstuvwxyz",
        min_length=1,
        max_length=512,
        description="Alphabet of the tokenizer: each character is one token and appears once. The default can write "
        "sums and plain words. verl: none.",
    )
    vision: RandomVisionSpec | None = Field(
        None,
        description="A vision tower, for images and videos; {} is a tiny one. Default: none, a text-only model. verl:"
        " none.",
    )

    @property
    def vocabulary(self) -> int:
        """Number of tokens: the characters and the special tokens (data/tokenizer.py, `character_tokenizer`)."""
        return len(self.characters) + (SPECIAL_TOKENS if self.vision is None else SPECIAL_TOKENS + VISION_TOKENS)


class ModelSourceSpec(Section):
    """Origin of the weights: exactly one of persistentVolumeClaim, path and random."""

    persistentVolumeClaim: PersistentVolumeClaimSpec | None = Field(
        None,
        description="Folder of a PersistentVolumeClaim that holds a Hugging Face checkpoint; it is mounted on every "
        "node. No default. verl: actor_rollout_ref.model.path.",
    )
    path: PathName | None = Field(
        None,
        description="Folder that holds a Hugging Face checkpoint and exists on every node; on a laptop it may be "
        "relative to the manifest. No default. verl: actor_rollout_ref.model.path.",
    )
    random: RandomModelSpec | None = Field(
        None, description="Random weights of the given shape, for tests and laptops. No default. verl: none."
    )


class ModelSpec(Section):
    """The model to train."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$",
        description="Name of the model as in the catalog, such as Qwen/Qwen3.5-35B-A3B; any name for random weights. "
        "It is reported in status and metrics. No default. verl: none.",
    )
    source: ModelSourceSpec = Field(
        description="Where the weights are read from: exactly one of persistentVolumeClaim, path and random. "
        "Required: qwen35 never downloads weights. verl: actor_rollout_ref.model.path."
    )
    precision: Precision = Field(
        "BF16",
        description="Number format of the forward and backward pass; trained weights have FP32 master copies. Default"
        " BF16, as in every published recipe; FP32 is for numeric tests. verl: "
        "actor_rollout_ref.actor.fsdp_config.dtype.",
    )
