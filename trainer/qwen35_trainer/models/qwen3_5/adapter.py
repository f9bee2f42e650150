"""Makes one Qwen3.5 model instance fit this trainer. Classes of the transformers library are never touched."""

from __future__ import annotations

from types import MethodType

from torch import Tensor

from qwen35_trainer.models.qwen3_5 import HFModule, linear_attention

MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
"""Values of `config.model_type` that this adapter takes."""


def adapt(model: HFModule) -> HFModule:
    """Give each Gated DeltaNet layer of a CPU model the forward whose cost follows the sequence's length.

    The input is right-padded sequences without a cache; padding to the right needs no mask (every mixer is causal).
    Raises ValueError for a model of another family.
    """
    kind = model.config.model_type
    if kind not in MODEL_TYPES:
        raise ValueError(f"model type {kind!r} is not Qwen3.5; supported: {', '.join(MODEL_TYPES)}")
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = MethodType(_forward, layer.linear_attn)
    return model


def _forward(
    layer: HFModule,
    hidden_states: Tensor,
    cache_params: object = None,
    attention_mask: Tensor | None = None,
    **_: object,
) -> Tensor:
    if cache_params is not None or attention_mask is not None:
        raise ValueError("an adapted layer takes right-padded sequences, without a cache or an attention mask")
    return linear_attention.sequence(layer, hidden_states)[0]
