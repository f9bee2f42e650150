"""The unit lower-triangular systems of the gated delta rule, solved by torch's solver or by matrix products.

    device    solver
    NPU       matrix products: torch_npu has no triangular solver, and torch's would run on the host
    others    torch.linalg.solve_triangular

The products invert the diagonal blocks of 2 positions, then those of 4, and so on up to the whole chunk:

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]]

This takes two products for each doubling, as many as (I - L)(I + L²)(I + L⁴)…, which is exact only without rounding: the entries of L's
powers are binomial coefficients where keys are alike, up to 10¹⁷ in a chunk of 64 positions, and cancel. Blocks have no such cancellation. In
float32, with keys that are alike and betas near 1, the largest error of a solution is at most 10⁻⁶ of its largest value, where the powers have
errors of 10¹⁰ and torch's solver has 10⁻⁶, too. Each system reads only the entries below the diagonal.

On a CPU, the products take 1.75 times as long as torch's solver forward, and two thirds of its time forward and backward together. Other
devices keep torch's solver, because scores and generation run forward only.

Hardware: nothing in this file has run on an NPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import Context

WITHOUT_SOLVER = {"npu"}
"""Types of devices on which systems are solved by matrix products."""


def solve(system: Tensor, right: Tensor) -> Tensor:
    """Return X with (I + L) X = right, where L is the part of `system` below its diagonal.

    system: (…, C, C), C positions of a chunk. right: (…, C, N), N right-hand sides. Returns (…, C, N).
    """
    if system.device.type in WITHOUT_SOLVER:
        solution: Tensor = SolveByProducts.apply(system, right)  # type: ignore[no-untyped-call]
        return solution
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


class SolveByProducts(torch.autograd.Function):
    """`solve` by matrix products. It keeps the inverse and the solution for its backward pass, as much as torch's solver keeps."""

    @staticmethod
    def forward(ctx: Context, system: Tensor, right: Tensor) -> Tensor:
        inverted = inverse(system)
        solution = inverted @ right
        ctx.save_for_backward(inverted, solution)
        return solution

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inverted, solution = ctx.saved_tensors
        of_right = inverted.mT @ gradients[0]
        return -(of_right @ solution.mT).tril(-1), of_right


def inverse(system: Tensor) -> Tensor:
    """Return (I + L)⁻¹, where L is the part of `system` (…, C, C) below its diagonal. Returns (…, C, C)."""
    positions = torch.arange(system.shape[-1], device=system.device)
    inverted, size = torch.eye(len(positions), dtype=system.dtype, device=system.device).expand_as(system), 1
    while size < len(positions):
        block = positions // size
        # C: rows of the second block of a pair, columns of the first.
        below = (block.unsqueeze(-1) - block == 1) & (block % 2 == 1).unsqueeze(-1)
        couplings = system * below
        # A block of one position is its own inverse.
        inverted = inverted - (couplings if size == 1 else inverted @ couplings @ inverted)
        size *= 2
    return inverted
