"""Freezing of parameters, and the type in which each parameter is stored."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qwen35_trainer.manifest import FrozenPart
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.models.qwen3_5.precision import keeps_float32


def freeze(model: HFModule, parts: Iterable[FrozenPart]) -> None:
    """Exclude `parts` of the model from training. Raises ValueError naming the parts that the model does not have."""
    missing = []
    for part in parts:
        modules = _modules(model, part)
        if not modules:
            missing.append(part)
        for module in modules:
            module.requires_grad_(False)
    if missing:
        raise ValueError(f"spec.train.freeze: {type(model).__name__} has no {' and no '.join(missing)}; remove it")


def without_tower(model: HFModule, parts: Iterable[FrozenPart]) -> tuple[FrozenPart, ...]:
    """Return the parts to freeze in a training without pictures: `parts`, and the vision tower if the model has one.

    Without pictures, the gradient of the tower is zero. Training the tower would need four float32 copies of its
    weights, and weight decay would change them.
    """
    return tuple(dict.fromkeys((*parts, "Vision"))) if _modules(model, "Vision") else tuple(parts)


def convert_frozen(model: HFModule, precision: torch.dtype) -> None:
    """Convert frozen parameters to the type with which the model computes, because they are never updated.

    This type is `precision`, or float32 for parameters that are published in float32 (`models/qwen3_5/precision.py`).
    Trainable parameters must be float32, because bfloat16 cannot represent small updates. Raises TypeError naming the
    trainable parameters that are not float32.
    """
    wrong = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if keeps_float32(name) else precision)
        elif parameter.dtype != torch.float32:
            wrong.append(f"{name} is {str(parameter.dtype).removeprefix('torch.')}")
    if wrong:
        raise TypeError(f"trainable parameters must be float32 when they are loaded: {', '.join(wrong)}")


def _modules(model: HFModule, part: FrozenPart) -> list[HFModule]:
    text = text_model(model)
    match part:
        case "Vision":
            return [model.model.visual] if hasattr(model.model, "visual") else []
        case "Embeddings":
            return [text.embed_tokens, model.lm_head]
        case "Router":
            gates = [(layer.mlp, name) for layer in text.layers for name in ("gate", "shared_expert_gate")]
            return [getattr(mlp, name) for mlp, name in gates if hasattr(mlp, name)]
