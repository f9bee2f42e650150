"""The short causal convolution of a Gated DeltaNet: depthwise, then silu. Sums are in float32 and rounded once, at the end.

    y_t = silu(Σ_b f_b · x_{t-b}),  b = 0 … W - 1        x_{t-b} is 0 before the sequence

flash-linear-attention, causal_conv1d and vLLM compute this function, too. Here the convolution is a sum of W shifted
products: on a CPU, the gradient of this sum costs a fraction of the gradient of PyTorch's general convolution. The
float32 sums are not kept; the backward pass computes them again.

Shapes: B sequences, T positions, C channels, W width; `filters` (C, W), whose last column is for the position itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import Context


def convolve(x: Tensor, filters: Tensor) -> Tensor:
    """Convolve right-padded sequences, starting from an empty state, and apply silu.

    x: (B, T, C), B sequences of T positions with C channels. filters: (C, width). Returns (B, T, C) in the type of `x`.
    """
    return _Convolution.apply(x, filters)  # type: ignore[no-untyped-call]


def step(window: Tensor, filters: Tensor) -> Tensor:
    """Compute the short convolution and silu for the newest position of each sequence.

    window: (B, W, C), the last W inputs of B sequences with C channels, the newest last. filters: (C, W). Returns (B,
    C) in the type of `window`.
    """
    return F.silu((window.float() * filters.float().T).sum(1)).type_as(window)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, filters: Tensor) -> Tensor:
        ctx.save_for_backward(x, filters)
        return F.silu(_sums(x, filters), inplace=True).type_as(x)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, filters = ctx.saved_tensors
        of_sums = torch.ops.aten.silu_backward(gradients[0].float(), _sums(x, filters))
        of_x, of_filters = of_sums * filters[:, -1], torch.zeros_like(filters, dtype=torch.float32)
        for back, taps in _taps(x, filters):
            later, before = of_sums[:, back:], x[:, : x.shape[1] - back]
            of_filters[:, -1 - back] = (later * before).sum((0, 1))
            if back:
                of_x[:, : x.shape[1] - back].addcmul_(later, taps)
        return of_x.type_as(x), of_filters.type_as(filters)


def _sums(x: Tensor, filters: Tensor) -> Tensor:
    """Compute the float32 sums (B, T, C) before silu. The oldest input comes first, as in the general convolution."""
    sums = torch.zeros_like(x, dtype=torch.float32)
    for back, taps in reversed(_taps(x, filters)):
        sums[:, back:].addcmul_(x[:, : x.shape[1] - back], taps)
    return sums


def _taps(x: Tensor, filters: Tensor) -> list[tuple[int, Tensor]]:
    """Return the columns of `filters` that reach into `x`, the newest position first.

    Each entry has the number of positions that the column reaches back, and the column's (C,) float32 values.
    """
    width = min(filters.shape[1], x.shape[1])
    return [(back, filters[:, -1 - back].float()) for back in range(width)]
