"""Sums and means over the tokens that train.

Multiplying by a mask of zeros does not remove NaN (0 · NaN = NaN), neither from the value nor from the gradient.
Selection (`torch.where`) removes NaN from both, so padding is always removed by selection.
"""

import torch
from torch import Tensor


def zero_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Return a copy of `values` with 0 in every entry whose mask is 0.

    No gradient flows to these entries. Shapes: (N, T), N sequences of up to T tokens. The result is float32, or float64
    for float64 values.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` over all trained tokens, a scalar.

    values, mask: (N, T), N sequences of up to T tokens.
    """
    return zero_padding(values, mask).sum()


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` over the trained tokens of each sequence, (N,).

    values, mask: (N, T), N sequences of up to T tokens.
    """
    return zero_padding(values, mask).sum(dim=-1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` over the trained tokens of each sequence, (N,); 0 for a sequence
    without trained tokens.

    values, mask: (N, T), N sequences of up to T tokens.
    """
    return sequence_sum(values, mask) / mask.bool().sum(dim=-1).clamp(min=1)
