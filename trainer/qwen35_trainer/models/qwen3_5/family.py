"""The supported versions of the transformers library, and access to the parts of a supported model."""

from __future__ import annotations

from torch import Tensor

from qwen35_trainer.models.qwen3_5 import HFModule

TRANSFORMERS = ("5.3.0", "5.20")
"""Supported versions of the transformers library: the first one and later, below the second one."""


def text_model(model: HFModule) -> HFModule:
    """Return the text decoder (embed_tokens, layers, norm, rotary_emb) of a text or a vision-language model."""
    return getattr(model.model, "language_model", model.model)


def rotary(text: HFModule, hidden: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary embedding of a text decoder, (n, T, R) each, in the type of `hidden`.

    places: (n, T, 3) positions in time, height and width, which are equal in a text. A decoder that reads text only (Qwen3)
    has one position for each token.
    """
    axes = places.movedim(-1, 0)
    cos, sin = text.rotary_emb(hidden, axes if hasattr(text.rotary_emb, "mrope_section") else axes[0])
    return cos, sin


def text_config(model: HFModule) -> HFModule:
    """Return the configuration of the text decoder of a text or a vision-language model."""
    return text_model(model).config
