"""The transformers classes of the supported models: which class a config.json names, and models built from configurations.

Besides Qwen3.5, these are mixtures of experts of Qwen3 (Qwen3-30B-A3B, Qwen3-235B-A22B). Their decoders have full attention
in every layer, without an output gate, and no shared expert.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from qwen35_trainer.models.qwen3_5 import HFModule, qwen3_moe
from qwen35_trainer.models.qwen3_5.model_types import CLASSES, TEXT_MODEL_TYPES

type HFConfig = Any
"""A configuration of the transformers library: its fields are attributes, which differ between versions."""


def layer_types(config: HFConfig) -> list[str]:
    """Return the kind of each decoder layer of a text model: full_attention or linear_attention."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    return kinds or ["full_attention"] * int(config.num_hidden_layers)


def read_config(folder: Path) -> HFConfig:
    """Read a folder's config.json into a configuration object of transformers.

    In the folder of a vision-language model, the first entry of `architectures` may be the class of the text model. The
    result is then the configuration of the text model alone.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = TEXT_MODEL_TYPES.get(config.model_type)
    if text is not None and (config.architectures or [None])[0] == CLASSES[text]:
        return text_part(config)
    if config.model_type == qwen3_moe.MODEL_TYPE:
        _as_computed(config)
    return config


def text_part(config: HFConfig) -> HFConfig:
    """Return the configuration of the text model inside a vision-language model. That of a text model is returned unchanged."""
    if config.model_type not in TEXT_MODEL_TYPES:
        return config
    inner = copy.deepcopy(config.text_config)
    inner.tie_word_embeddings = config.tie_word_embeddings  # published files have this field outside
    return inner


def _as_computed(config: HFConfig) -> None:
    """Set the fields of a configuration of Qwen3 as transformers' class of the model reads them, for all other readers."""
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if hasattr(config, "shared_expert_intermediate_size"):
        # Some folders have this field, with the value 0. The model has no shared expert.
        del config.shared_expert_intermediate_size


def construct(config: HFConfig) -> HFModule:
    """Build the model of a configuration with random weights in float32, whatever types the configuration names.

    transformers would use the types in the configuration. They may differ between the text model and the vision tower:
    published configurations name bfloat16 for the text model, and no type for the tower.
    """
    import transformers

    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = torch.float32
    return getattr(transformers, CLASSES[config.model_type])(config)


def without_weights(config: HFConfig) -> HFModule:
    """Build the model of a configuration on the meta device: names and shapes without values."""
    with torch.device("meta"):
        return construct(config)
