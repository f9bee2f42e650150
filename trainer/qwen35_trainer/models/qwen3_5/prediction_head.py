"""The head of published models that predicts one more token (multi-token prediction, MTP): its tensors `mtp.*`.

    hidden state of token p, after the final norm ─► pre_fc_norm_hidden ────┐
    embedding of token p + 1 ────────────────────► pre_fc_norm_embedding ───┴─► fc ─► layer ─► norm ─► output layer: token p + 2

The input of `fc` has the embedding first. `layer` is a decoder layer with full attention, at position p. All norms are
zero-centred. Embedding and output layer are those of the model. transformers has no module for the head; vLLM has
(`qwen3_5_mtp.py`), and drafts tokens with it. The head is the one of DeepSeek-V3 (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qwen35_trainer.models.qwen3_5.qwen3_moe import MODEL_TYPE

PREFIX = "mtp."
LAYER = f"{PREFIX}layers.0."
"""Prefix of the tensors of the head's decoder layer. After it, they have the names of any decoder layer."""

_FULL_ATTENTION = "full_attention"


def shapes(layer_types: list[str], model: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return name of a tensor of the head → its shape.

    layer_types: the kind of each decoder layer. model: name of a parameter of the text model → its shape. One of its
    layers must have full attention (`problems`): the head's layer has the shapes of this layer.
    """
    prefix = f"model.layers.{layer_types.index(_FULL_ATTENTION)}."
    [channels] = model["model.norm.weight"]
    head: dict[str, tuple[int, ...]] = {
        f"{PREFIX}{name}.weight": (channels,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    head[f"{PREFIX}fc.weight"] = (channels, 2 * channels)
    return head | {LAYER + name.removeprefix(prefix): shape for name, shape in model.items() if name.startswith(prefix)}


def problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for each setting of a model with which its head cannot be trained.

    config: the fields of the text model in config.json.
    """
    if config.get("model_type") == MODEL_TYPE:
        yield f"models of type {MODEL_TYPE} have no head for multi-token prediction.", "Remove it."
        return
    remove = "Remove the field, or use a folder as published."
    if (depths := config.get("mtp_num_hidden_layers", 1)) != 1:
        yield (
            f"mtp_num_hidden_layers of the model's config.json is {depths}, and a head of 1 layer can be trained.",
            remove,
        )
    if config.get("mtp_use_dedicated_embeddings"):
        yield (
            "mtp_use_dedicated_embeddings of the model's config.json is true, and the head uses the model's embedding.",
            remove,
        )
    if _FULL_ATTENTION not in config.get("layer_types", (_FULL_ATTENTION,)):
        yield "the model has no layer with full attention, which the layer of the head is.", remove
