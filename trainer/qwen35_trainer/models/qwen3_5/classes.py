"""The classes of the transformers library for configurations of this family."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qwen35_trainer.models.qwen3_5 import HFModule

type HFConfig = Any
"""A configuration of the transformers library: its fields are attributes, which differ between versions."""

TEXT_MODEL_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""`model_type` of a vision-language model → `model_type` of the text model inside it."""
CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""`model_type` in config.json → name of the class of that model in transformers."""


def family_problem(config: Mapping[str, Any]) -> str | None:
    """Return why the contents of a config.json are not of this family, or None if they are."""
    kind = config.get("model_type")
    if kind in CLASSES:
        return None
    return f"config.json: model_type {kind!r} is not Qwen3.5; supported: {', '.join(CLASSES)}."


def read_config(folder: Path) -> HFConfig:
    """Read the configuration object of a folder.

    If the `architectures` of a vision-language folder name the class of the text model alone, the result is the
    configuration of the text model.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = TEXT_MODEL_TYPES.get(config.model_type)
    if text is not None and (config.architectures or [None])[0] == CLASSES[text]:
        inner = config.text_config
        inner.tie_word_embeddings = config.tie_word_embeddings
        return inner
    return config


def construct(config: HFConfig) -> HFModule:
    """Build the model of a configuration with random weights in float32, whatever types the configuration names.

    transformers would use the types in the configuration, which may differ between the text model and the vision tower:
    published configurations name bfloat16 for the text, and no type for the tower.
    """
    import transformers

    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = torch.float32
    return getattr(transformers, CLASSES[config.model_type])(config)


def without_weights(config: HFConfig) -> HFModule:
    """Build the model of a configuration on the meta device, with names and shapes but no values."""
    with torch.device("meta"):
        return construct(config)
