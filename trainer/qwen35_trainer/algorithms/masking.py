"""Sums and means over the tokens that train.

Multiplying by a mask of zeros does not remove NaN (0 · NaN = NaN), neither from the value nor from the gradient.
Selection (`torch.where`) removes NaN from both, so padding is always removed by selection.
"""

import torch
from torch import Tensor


def zero_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` (N, T) with 0, without gradient, where `mask` (N, T) is 0.

    The result is float32, or float64 for float64 values.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` (N, T) over all trained tokens, a scalar."""
    return zero_padding(values, mask).sum()


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` (N, T) over the trained tokens of each sequence, (N,)."""
    return zero_padding(values, mask).sum(dim=-1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` (N, T) over the trained tokens of each sequence, (N,).

    The mean of a sequence without trained tokens is 0.
    """
    return sequence_sum(values, mask) / mask.bool().sum(dim=-1).clamp(min=1)
