"""Which parameters train."""

from __future__ import annotations

from collections.abc import Iterable

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.spec import Part


def freeze(model: HFModule, parts: Iterable[Part]) -> None:
    """Take `parts` out of training. Raises ValueError naming those that the model does not have."""
    missing = []
    for part in parts:
        modules = _modules(model, part)
        if not modules:
            missing.append(part)
        for module in modules:
            module.requires_grad_(False)
    if missing:
        raise ValueError(f"spec.train.freeze: {type(model).__name__} has no {' and no '.join(missing)}; remove it")


def _modules(model: HFModule, part: Part) -> list[HFModule]:
    text = text_model(model)
    match part:
        case "Vision":
            return [model.model.visual] if hasattr(model.model, "visual") else []
        case "Embeddings":
            return [text.embed_tokens, model.lm_head]
        case "Router":
            gates = [(layer.mlp, name) for layer in text.layers for name in ("gate", "shared_expert_gate")]
            return [getattr(mlp, name) for mlp, name in gates if hasattr(mlp, name)]
