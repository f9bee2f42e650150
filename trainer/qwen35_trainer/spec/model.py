"""spec.model: which weights the run starts from."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.spec.base import PathName, PersistentVolumeClaim, Section

Precision = Literal["BF16", "FP32"]


class RandomVision(Section):
    """A vision tower with random weights, which makes the model a vision-language one."""

    depth: int = Field(
        2, ge=1, le=64, description="Blocks of the tower. 2 is the least that has an inner one. verl: none."
    )
    heads: int = Field(
        2, ge=1, le=64, description="Attention heads of a block. 2 is the least that shards. verl: none."
    )
    headDim: int = Field(
        16,
        ge=4,
        le=256,
        multiple_of=4,
        description="Channels per head; heads × headDim is the tower's width. A multiple of 4, since rows and columns of "
        "patches turn a quarter of the channels each, in pairs. 16 stays small. verl: none.",
    )
    intermediateSize: int = Field(
        64, ge=8, le=16384, description="Width inside the MLP of a block. 2 × heads × headDim. verl: none."
    )
    patchSize: int = Field(
        4,
        ge=1,
        le=64,
        description="Side of a patch, in pixels. 4, so that an image of 8 × 8 pixels is one token; published "
        "checkpoints have 16. verl: none.",
    )
    temporalPatchSize: int = Field(
        2, ge=1, le=8, description="Frames of a video in one patch. 2 as in the published checkpoints. verl: none."
    )
    spatialMergeSize: int = Field(
        2,
        ge=1,
        le=8,
        description="Patches per side that become one token: 2 makes 2 × 2 patches one, as in the published "
        "checkpoints. verl: none.",
    )
    positionGrid: int = Field(
        8,
        ge=2,
        le=256,
        description="Side of the learned grid of positions, which is stretched over each image. 8 holds images of "
        "32 × 32 pixels without stretching. verl: none.",
    )


class RandomModel(Section):
    """A Qwen3.5 with random weights and one token per character: real architecture, no download."""

    hiddenSize: int = Field(
        64, ge=8, le=8192, description="Width of the residual stream. 64 trains on one CPU core. verl: none."
    )
    intermediateSize: int = Field(
        128, ge=8, le=32768, description="Width inside the MLP, or inside each expert. 2 × hiddenSize. verl: none."
    )
    layers: int = Field(
        4, ge=1, le=128, description="Decoder layers. 4 is one full pattern of layer kinds. verl: none."
    )
    fullAttentionInterval: int = Field(
        4,
        ge=1,
        le=128,
        description="Every n-th layer has full attention, the others are Gated DeltaNet. 4 as in the published "
        "checkpoints. verl: none.",
    )
    attentionHeads: int = Field(
        4, ge=1, le=128, description="Query heads of a full-attention layer. 4 × headDim is hiddenSize. verl: none."
    )
    keyValueHeads: int = Field(
        2, ge=1, le=128, description="Key and value heads; divides attentionHeads. 2 exercises grouping. verl: none."
    )
    headDim: int = Field(
        16, ge=4, le=512, description="Channels per attention head. Small, yet room for partial rotary. verl: none."
    )
    linearKeyHeads: int = Field(
        2, ge=1, le=128, description="Key heads of a Gated DeltaNet layer. 2 is the least that shards. verl: none."
    )
    linearValueHeads: int = Field(
        2,
        ge=1,
        le=128,
        description="Value heads of a Gated DeltaNet layer; a multiple of linearKeyHeads. Equal to it by default, "
        "the simplest case. verl: none.",
    )
    linearHeadDim: int = Field(
        16, ge=4, le=512, description="Channels per Gated DeltaNet head. As headDim, to stay small. verl: none."
    )
    experts: int = Field(
        0, ge=0, le=1024, description="Experts per layer; 0 is a dense MLP. 0, since dense is quickest. verl: none."
    )
    expertsPerToken: int = Field(
        2, ge=1, le=64, description="Experts that a token is routed to. 2 makes routing weights matter. verl: none."
    )
    initializerRange: float = Field(
        0.06,
        gt=0,
        le=1,
        description="Standard deviation of the initial weights. 0.06 lets so narrow a model learn within some "
        "dozens of updates. verl: none.",
    )
    tieEmbeddings: bool = Field(
        False, description="Share the input embedding with the output layer. Off, as in large checkpoints. verl: none."
    )
    characters: str = Field(
        "0123456789+-=<>, abcdefghijklmnopqrstuvwxyz",
        min_length=1,
        max_length=512,
        description="The alphabet: each character, once, is one token. The default writes sums and plain words. "
        "verl: none.",
    )
    vision: RandomVision | None = Field(
        None,
        description="A vision tower in front, for images and videos; {} is a tiny one. None, the default, is a text "
        "model. verl: none.",
    )


class ModelSource(Section):
    """Where the weights come from: exactly one of the three."""

    persistentVolumeClaim: PersistentVolumeClaim | None = Field(
        None,
        description="Folder of a claim that holds a Hugging Face checkpoint, mounted on every node. No default. "
        "verl: actor_rollout_ref.model.path.",
    )
    path: PathName | None = Field(
        None,
        description="Folder with a Hugging Face checkpoint that exists on every node, or, on a laptop, relative to "
        "the manifest. No default. verl: actor_rollout_ref.model.path.",
    )
    random: RandomModel | None = Field(
        None, description="Random weights of the given shape, for tests and laptops. No default. verl: none."
    )


class Model(Section):
    """The model that is trained."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$",
        description="Name of the model, as in the catalog (Qwen/Qwen3.5-35B-A3B); free for random weights. Reported "
        "in status and metrics. No default: the choice is the user's. verl: none.",
    )
    source: ModelSource = Field(
        description="Where the weights are read from: exactly one of persistentVolumeClaim, path and random. No "
        "default: nothing is downloaded behind the user's back. verl: actor_rollout_ref.model.path."
    )
    precision: Precision = Field(
        "BF16",
        description="Number format of the forward and backward pass; master weights stay FP32. BF16 as in every "
        "published recipe; FP32 for numeric tests. verl: actor_rollout_ref.actor.fsdp_config.dtype.",
    )
