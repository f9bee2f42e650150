"""The supported models, by the `model_type` in config.json. This module needs no torch, so that a manifest can be checked quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35_trainer.models.qwen3_5 import qwen3_moe

TEXT_MODEL_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""`model_type` of a vision-language model → `model_type` of the text model inside it."""
CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""`model_type` in config.json → name of the model's class in transformers."""


def family_problem(config: Mapping[str, Any]) -> str | None:
    """Return why the contents of a config.json are not those of a supported model, or None if they are."""
    kind = config.get("model_type")
    if kind == qwen3_moe.MODEL_TYPE:
        return qwen3_moe.problem(config)
    if kind in CLASSES:
        return None
    return f"config.json: model_type {kind!r} is not supported; supported: {', '.join(CLASSES)}."
