"""Sums and means over the tokens that train.

A product with a mask of zeros does not stop NaN (0 · NaN = NaN), neither in the value nor in the gradient.
Selection does, in both directions, so padding is always selected away and never multiplied away.
"""

import torch
from torch import Tensor


def zero_padding(values: Tensor, mask: Tensor) -> Tensor:
    """`values` (N, T) where `mask` (N, T) is set, 0 elsewhere, at least float32. The rest gets no gradient."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar sum of `values` (N, T) over all trained tokens."""
    return zero_padding(values, mask).sum()


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) sum of `values` (N, T) over each sequence's trained tokens."""
    return zero_padding(values, mask).sum(dim=-1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) mean of `values` (N, T) over each sequence's trained tokens; 0 for a sequence without any."""
    return sequence_sum(values, mask) / mask.bool().sum(dim=-1).clamp(min=1)
