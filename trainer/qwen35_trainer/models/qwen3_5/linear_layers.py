"""Names of the decoder's linear layers, which LoRA may target. They are found from a configuration, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35_trainer.models.qwen3_5.qwen3_moe import MODEL_TYPE

FULL_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
GATED_DELTA_NET = frozenset({"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"})
FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Names of the linear layers in the MLP of a dense layer and in a shared expert. Routed
experts are not linear layers."""
SHARED_EXPERT_GATE = frozenset({"shared_expert_gate"})


def linear_layers(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that `spec.train.lora.targets` may list: the last parts of the names of the
    decoder's linear layers.

    config: the contents of the config.json of a text or a vision-language model.
    """
    text = config.get("text_config", config)
    if text.get("model_type") == MODEL_TYPE:
        return FULL_ATTENTION
    kinds = text.get("layer_types") or _pattern(
        text.get("num_hidden_layers", 32), text.get("full_attention_interval", 4)
    )
    names = FEED_FORWARD
    if "full_attention" in kinds:
        names |= FULL_ATTENTION
    if "linear_attention" in kinds:
        names |= GATED_DELTA_NET
    return names | SHARED_EXPERT_GATE if "moe" in text.get("model_type", "") else names


def _pattern(layers: int, interval: int) -> list[str]:
    """Return the kind of each layer for a configuration that does not list the kinds.

    Every `interval`-th layer has full attention; the others have linear attention.
    """
    return ["linear_attention" if layer % interval else "full_attention" for layer in range(1, layers + 1)]
