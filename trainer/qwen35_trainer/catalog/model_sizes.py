"""The sizes of a model's layers, as config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from qwen35_trainer.manifest.model import RandomModelSpec


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision tower."""

    depth: int
    hidden: int
    intermediate: int
    patch_values: int = 3 * 2 * 16 * 16
    """Numbers of a patch: channels × frames × rows × columns."""
    positions: int = 2304
    merged_patches: int = 4
    """Patches that become one token."""

    def parameters(self, out: int) -> int:
        """Return the number of parameters. out: width of the text model."""
        block = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        vectors = 9 * self.hidden + self.intermediate  # biases and two layer norms
        merged = self.hidden * self.merged_patches
        merger = merged * merged + merged * out + merged + out + 2 * self.hidden
        patches = (self.patch_values + 1 + self.positions) * self.hidden
        return self.depth * (block + vectors) + merger + patches


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a text model, and of its vision tower if it has one.

    A Qwen3 model has full attention in every layer (`full_attention_interval` 1) and no output gate.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int = 0
    """Width of the dense MLP; 0 with experts."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the shared expert; 0 without one."""
    full_attention_interval: int = 4
    output_gate: bool = True
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    linear_filter: int = 4
    tied: bool = False
    vision: VisionShape | None = None

    @property
    def full_layers(self) -> int:
        """Number of layers with full attention: the last of every `full_attention_interval` layers."""
        return self.layers // self.full_attention_interval

    @property
    def linear_layers(self) -> int:
        """Number of Gated DeltaNet layers."""
        return self.layers - self.full_layers

    @property
    def linear_keys(self) -> int:
        """Channels of all key heads of a Gated DeltaNet."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_values(self) -> int:
        """Channels of all value heads of a Gated DeltaNet."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def query(self) -> int:
        """Channels of all query heads of full attention."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Channels of all key heads of full attention, as many as of all value heads."""
        return self.kv_heads * self.head_dim

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the shape that the contents of a config.json describe. Raises KeyError with the name of a missing key."""
        text: Mapping[str, Any] = config.get("text_config", config)
        tower: Mapping[str, Any] | None = config.get("vision_config")
        linear = {
            "linear_key_heads": "linear_num_key_heads",
            "linear_value_heads": "linear_num_value_heads",
            "linear_key_dim": "linear_key_head_dim",
            "linear_value_dim": "linear_value_head_dim",
            "linear_filter": "linear_conv_kernel_dim",
        }
        hybrid = "linear_num_key_heads" in text
        experts = text.get("num_experts") or 0
        return cls(
            hidden=text["hidden_size"],
            layers=text["num_hidden_layers"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
            vocabulary=text["vocab_size"],
            intermediate=0 if experts else text["intermediate_size"],
            experts=experts,
            experts_per_token=text["num_experts_per_tok"] if experts else 0,
            expert_intermediate=text["moe_intermediate_size"] if experts else 0,
            shared_intermediate=(text.get("shared_expert_intermediate_size") or 0) if experts else 0,
            full_attention_interval=(text.get("full_attention_interval") or 4) if hybrid else 1,
            output_gate=hybrid,
            **({name: text[key] for name, key in linear.items()} if hybrid else {}),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            vision=None if tower is None else _tower(tower),
        )

    @classmethod
    def of_random(cls, random: RandomModelSpec, vocabulary: int) -> Self:
        """Return the shape of a model with random weights. vocabulary: number of tokens of its tokenizer."""
        experts, vision = random.experts > 0, random.vision
        return cls(
            hidden=random.hiddenSize,
            layers=random.layers,
            heads=random.attentionHeads,
            kv_heads=random.keyValueHeads,
            head_dim=random.headDim,
            vocabulary=vocabulary,
            intermediate=0 if experts else random.intermediateSize,
            experts=random.experts,
            experts_per_token=random.expertsPerToken if experts else 0,
            expert_intermediate=random.intermediateSize if experts else 0,
            shared_intermediate=random.intermediateSize if experts else 0,
            full_attention_interval=random.fullAttentionInterval,
            linear_key_heads=random.linearKeyHeads,
            linear_value_heads=random.linearValueHeads,
            linear_key_dim=random.linearHeadDim,
            linear_value_dim=random.linearHeadDim,
            tied=random.tieEmbeddings,
            vision=None
            if vision is None
            else VisionShape(
                vision.depth,
                vision.heads * vision.headDim,
                vision.intermediateSize,
                3 * vision.temporalPatchSize * vision.patchSize**2,
                vision.positionGrid**2,
                vision.spatialMergeSize**2,
            ),
        )


def _tower(config: Mapping[str, Any]) -> VisionShape:
    return VisionShape(
        config["depth"],
        config["hidden_size"],
        config["intermediate_size"],
        config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2,
        config["num_position_embeddings"],
        config["spatial_merge_size"] ** 2,
    )
