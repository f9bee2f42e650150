"""Matrix products of 16-bit operands with float32 sums. The product of two 16-bit numbers is exact in float32.

device      computation
CUDA        torch's product, with a float32 result
others      float32 copies of the operands; `rows_times` copies the weight a block at a time
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**24
"""Number of elements of the weight that are copied to float32 at a time (64 MiB)."""


def rows_times(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows · weightᵀ in float32, (R, V). Both operands have the same type.

    rows: (R, D). weight: (V, D), V output channels for D input channels.
    """
    if weight.dtype == torch.float32:
        return rows @ weight.T
    if weight.device.type == "cuda":
        return torch.mm(rows, weight.T, out_dtype=torch.float32)
    product, wide = rows.new_empty(len(rows), len(weight), dtype=torch.float32), rows.float()
    block = max(1, BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), block):
        part = slice(start, start + block)
        product[:, part] = wide @ weight[part].float().T
    return product


def add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ · right to `total` in place.

    total: (V, D) float32. left: (R, V). right: (R, D). left and right have the same type; the sum
    runs over their R rows.
    """
    if right.dtype != torch.float32 and total.device.type == "cuda":
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.T.float(), right.float())
