"""The supported versions of the transformers library, and access to the parts of a model of this family."""

from __future__ import annotations

from qwen35_trainer.models.qwen3_5 import HFModule

TRANSFORMERS = ("5.3.0", "5.20")
"""Supported versions of the transformers library: the first one and later, below the second one."""


def text_model(model: HFModule) -> HFModule:
    """Return the text decoder (embed_tokens, layers, norm, rotary_emb) of a text or a vision-language model."""
    return getattr(model.model, "language_model", model.model)


def text_config(model: HFModule) -> HFModule:
    """Return the configuration of the text decoder of a text or a vision-language model."""
    return text_model(model).config
