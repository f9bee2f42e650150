"""Which parameters stay in float32 where the rest of the model is stored and computed in bfloat16."""

from __future__ import annotations

import torch

PRECISIONS = {"BF16": torch.bfloat16, "FP32": torch.float32}
"""By `model.precision` of the manifest."""
FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of the parameters that published Qwen3.5 files hold in float32; all others are bfloat16 there."""


def keeps_float32(name: str) -> bool:
    """Whether the parameter of this name is float32 in every precision of the model.

    `A_log` is the logarithm of a rate of decay that acts at every position of a sequence: rounded to bfloat16, the rate
    is up to 1.6 % wrong at all of them. `dt_bias` is bfloat16 in published files, and is only added in float32: what a trainer
    rounds there, a rollout engine rounds too.
    """
    return name.endswith(FLOAT32)


def stored_in(name: str, precision: torch.dtype) -> torch.dtype:
    """The type of the parameter of this name in a model that is stored in `precision`."""
    return torch.float32 if keeps_float32(name) else precision
