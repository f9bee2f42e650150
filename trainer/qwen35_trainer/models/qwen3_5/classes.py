"""Which class of the transformers library a configuration of this family stands for."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qwen35_trainer.models.qwen3_5 import HFModule

type HFConfig = Any
"""A configuration of the transformers library: its fields are reached by name, and differ between versions."""

TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Vision-language model types, and the type of the text model inside each."""
CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""By `model_type` of config.json."""


def family_problem(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the family that the contents of a config.json name; None for one of this family."""
    kind = config.get("model_type")
    if kind in CLASSES:
        return None
    return f"config.json: model_type {kind!r} is not Qwen3.5; supported: {', '.join(CLASSES)}."


def read_config(folder: Path) -> HFConfig:
    """The configuration object of a folder. A vision-language folder whose `architectures` name the class of the text
    model alone gives the configuration of its text model.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = TEXT_OF.get(config.model_type)
    if text is not None and (config.architectures or [None])[0] == CLASSES[text]:
        inner = config.text_config
        inner.tie_word_embeddings = config.tie_word_embeddings
        return inner
    return config


def construct(config: HFConfig) -> HFModule:
    """The model of a configuration, with fresh weights in float32, whatever types the configuration names.

    The library builds each half of a vision-language model in the type that its part of the configuration names. Published
    ones name bfloat16 for the text, and nothing for the vision tower.
    """
    import transformers

    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = torch.float32
    return getattr(transformers, CLASSES[config.model_type])(config)


def without_weights(config: HFConfig) -> HFModule:
    """The model of a configuration on the meta device: names and shapes, no values."""
    with torch.device("meta"):
        return construct(config)
