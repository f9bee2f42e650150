"""Parameters that stay in float32 when the rest of the model is stored and computed in bfloat16."""

from __future__ import annotations

import torch

PRECISIONS = {"BF16": torch.bfloat16, "FP32": torch.float32}
"""Value of `model.precision` in the manifest → type."""
FLOAT32_PARAMETERS = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Suffixes of the names of parameters that published Qwen3.5 files hold in float32; all others are bfloat16."""


def keeps_float32(name: str) -> bool:
    """Whether the parameter of this name is float32 in every precision of the model.

    `A_log` is the logarithm of a decay rate that applies at every position of a sequence: rounded to bfloat16, the rate has
    an error of up to 1.6 % at all positions. `dt_bias` does not stay in float32: published files hold
    it in bfloat16, so trainer and rollout engine round it in the same way, and only its addition is in float32.
    """
    return name.endswith(FLOAT32_PARAMETERS)


def stored_in(name: str, precision: torch.dtype) -> torch.dtype:
    """Return the type of the parameter of this name in a model that is stored in `precision`."""
    return torch.float32 if keeps_float32(name) else precision
