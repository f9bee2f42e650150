"""Sums and means over the tokens that train.

Multiplying by a mask of zeros does not remove NaN (0 · NaN = NaN), neither from the value nor from the gradient.
Selection removes it from both, so padding is always removed by selection (`torch.where`).
"""

import torch
from torch import Tensor


def zero_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Replace `values` (N, T) by 0, without gradient, where `mask` (N, T) is 0.

    Returns float32, or float64 for float64 values.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum `values` (N, T) over all trained tokens.  Returns a scalar."""
    return zero_padding(values, mask).sum()


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum `values` (N, T) over the trained tokens of each sequence.  Returns (N,)."""
    return zero_padding(values, mask).sum(dim=-1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average `values` (N, T) over the trained tokens of each sequence.  Returns (N,), 0 for a sequence without trained tokens."""
    return sequence_sum(values, mask) / mask.bool().sum(dim=-1).clamp(min=1)
