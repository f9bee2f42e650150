"""The sizes of a model's layers, which config.json contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from qwen35_trainer.manifest.model import RandomModelSpec


@dataclass(frozen=True)
class VisionShape:
    """The sizes of a vision tower."""

    depth: int
    hidden: int
    intermediate: int
    patch_values: int = 3 * 2 * 16 * 16
    """Number of values in a patch: channels × frames × rows × columns."""
    positions: int = 2304
    """Number of learned position embeddings."""
    merged_patches: int = 4
    """Number of patches that are merged into one token."""

    def parameters(self, out: int) -> int:
        """Return the number of parameters of the vision tower. out: hidden size of the text model."""
        block = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        vectors = 9 * self.hidden + self.intermediate  # biases and two layer norms
        merged = self.hidden * self.merged_patches
        merger = merged * merged + merged * out + merged + out + 2 * self.hidden
        patches = (self.patch_values + 1 + self.positions) * self.hidden
        return self.depth * (block + vectors) + merger + patches


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a text model, and of its vision tower if it has one.

    A Qwen3 model has full attention in every layer (`full_attention_interval` 1) and no output gate.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int = 0
    """Width of the dense MLP; 0 in a mixture of experts."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the shared expert; 0 if the model has no shared expert."""
    full_attention_interval: int = 4
    output_gate: bool = True
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    linear_filter: int = 4
    tied: bool = False
    vision: VisionShape | None = None
    positions: int | None = None
    """Maximum number of tokens of a prompt and its response for which config.json describes positions; None: not known."""

    @property
    def full_layers(self) -> int:
        """Number of layers with full attention: the last of every `full_attention_interval` consecutive layers."""
        return self.layers // self.full_attention_interval

    @property
    def linear_layers(self) -> int:
        """Number of layers with a Gated DeltaNet."""
        return self.layers - self.full_layers

    @property
    def linear_keys(self) -> int:
        """Width of the keys of a Gated DeltaNet: key heads × channels of a head. Queries have the same width."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_values(self) -> int:
        """Width of the values of a Gated DeltaNet: value heads × channels of a head."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def query(self) -> int:
        """Width of the queries of a full-attention layer: attention heads × channels of a head."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of the keys of a full-attention layer: key-value heads × channels of a head. Values have the same width."""
        return self.kv_heads * self.head_dim

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the sizes that a model's config.json describes.

        config: the parsed file. Raises KeyError with the name of a missing key, and TypeError with the names of all sizes
        that are not whole numbers.
        """
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
        # transformers writes the number of experts of Qwen3 under the second name.
        experts = text.get("num_experts") or text.get("num_local_experts") or 0
        sizes = cls(
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
            shared_intermediate=(text.get("shared_expert_intermediate_size") or 0) if experts and hybrid else 0,
            full_attention_interval=(text.get("full_attention_interval") or 4) if hybrid else 1,
            output_gate=hybrid,
            **({name: text[key] for name, key in linear.items()} if hybrid else {}),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            vision=None if tower is None else _tower(tower),
            positions=positions_of(config),
        )
        values = {field.name: getattr(sizes, field.name) for field in fields(cls)}
        wrong = [name for name in values.keys() - {"vision", "positions"} if not isinstance(values[name], int)]
        if wrong:
            raise TypeError(", ".join(f"{name} {values[name]!r} is not a whole number" for name in sorted(wrong)))
        return sizes

    @classmethod
    def of_random(cls, random: RandomModelSpec, vocabulary: int) -> Self:
        """Return the sizes of a model with random weights. vocabulary: number of tokens of its tokenizer."""
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


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of positions that a model's config.json allows; None if the file does not contain it.

    config: the parsed file. vLLM multiplies max_position_embeddings by the factor of rotary embeddings of the types linear and
    dynamic. With yarn, older versions take the original number times the factor, and newer ones max_position_embeddings; the result is
    the larger of both (`_get_and_verify_max_len` in vllm/config/model.py).
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping) or not isinstance(positions := text.get("max_position_embeddings"), int):
        return None
    rotary = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = rotary.get("factor") if isinstance(rotary, Mapping) else None
    if not isinstance(factor, int | float):
        return positions
    kind = rotary.get("rope_type", rotary.get("type"))
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    if kind == "yarn" and isinstance(original := rotary.get("original_max_position_embeddings"), int):
        return max(positions, int(original * factor))
    return positions


def _tower(config: Mapping[str, Any]) -> VisionShape:
    return VisionShape(
        config["depth"],
        config["hidden_size"],
        config["intermediate_size"],
        config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2,
        config["num_position_embeddings"],
        config["spatial_merge_size"] ** 2,
    )
