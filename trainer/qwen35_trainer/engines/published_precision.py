"""The type in which weights are published."""

from __future__ import annotations

import torch

from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.models.qwen3_5.precision import PRECISIONS


def published_precision(spec: TrainingSpec) -> torch.dtype:
    """Return the type of published weights. It does not apply to weights that are always float32 (`keeps_float32`).

    For vLLM without LoRA, the type is bfloat16 whatever `model.precision` is, because vLLM would round float32 weights
    in the same way after their transfer. In all other cases, the type is `model.precision`. With LoRA, vLLM multiplies
    an adapter by its scale before it rounds the product, so adapters must not be rounded earlier.
    """
    in_bfloat16 = spec.rollout is not None and spec.rollout.engine == "VLLM" and spec.train.lora is None
    return torch.bfloat16 if in_bfloat16 else PRECISIONS[spec.model.precision]
