"""Parameters that stay in float32 when the rest of the model is stored and computed in bfloat16."""

from __future__ import annotations

import torch

PRECISIONS = {"BF16": torch.bfloat16, "FP32": torch.float32}
"""Value of `model.precision` in the manifest → type of torch."""
FLOAT32_PARAMETERS = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Suffixes of the names of parameters that published Qwen3.5 files store in float32. All
others are stored in bfloat16."""


def keeps_float32(name: str) -> bool:
    """Whether the parameter called `name` is float32, whatever precision the model has.

    `A_log` is the logarithm of a decay rate that applies at every position of a sequence. If `A_log` were rounded to
    bfloat16, the rate would have an error of up to 1.6 % at all positions. `dt_bias` is not kept in float32: published
    files store it in bfloat16, so trainer and rollout engine round it in the same way. Only the addition of `dt_bias`
    is in float32.
    """
    return name.endswith(FLOAT32_PARAMETERS)


def stored_in(name: str, precision: torch.dtype) -> torch.dtype:
    """Return the type of the parameter called `name` in a model that is stored in `precision`."""
    return torch.float32 if keeps_float32(name) else precision
