"""Which versions of Qwen3.5's code this package knows, and where the parts of a model are."""

from __future__ import annotations

from qwen35_trainer.models.qwen3_5 import HFModule

TRANSFORMERS = ("5.3.0", "5.20")
"""Versions of the transformers library whose models this package knows: from the first, below the second."""


def text_model(model: HFModule) -> HFModule:
    """The text decoder (embed_tokens, layers, norm, rotary_emb) of a text or a vision-language model."""
    return getattr(model.model, "language_model", model.model)


def text_config(model: HFModule) -> HFModule:
    """The settings of that decoder."""
    return text_model(model).config
