"""The type in which weights are published."""

from __future__ import annotations

import torch

from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.models.qwen3_5.precision import PRECISIONS


def published_precision(spec: TrainingSpec) -> torch.dtype:
    """Return the type of published weights, apart from those that stay in float32.

    For vLLM this is bfloat16 whatever `model.precision` is: vLLM would round float32 weights in the same way after their transfer.
    Adapters are an exception, because they are multiplied by their scale before vLLM rounds them.
    """
    in_bfloat16 = spec.rollout is not None and spec.rollout.engine == "VLLM" and spec.train.lora is None
    return torch.bfloat16 if in_bfloat16 else PRECISIONS[spec.model.precision]
