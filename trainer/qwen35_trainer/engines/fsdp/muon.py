"""Muon: momentum whose direction is made orthogonal, matrix by matrix.

    M ← μ·M + (1 - μ)·G        U = (1 - μ)·G + μ·M  (Nesterov)        W ← (1 - η·λ)·W - 0.2·√max(rows, columns)·η·O(U)

O(U) is the nearest semi-orthogonal matrix to U, up to singular values in about [0.7, 1.2] (Jordan 2024,
kellerjordan.github.io/posts/muon). The factor gives a step the root mean square of AdamW's, so that learning rate and weight
decay tuned for AdamW do (Liu et al., arXiv:2502.16982, section 2.2). The same arithmetic as torch.optim.Muon with
match_rms_adamw; what differs is that weights may be sharded, and may be stacks of matrices.

Of a sharded matrix the update is gathered, every rank makes the whole of it orthogonal, and keeps its rows: the iteration
needs the whole matrix, and doing it everywhere costs less than a second exchange. A stack (experts, rows, columns) is
sharded by experts: each rank has whole matrices and gathers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from qwen35_trainer.engines.fsdp.loading import own

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic: steepest at 0, so that small singular values rise quickly (Jordan 2024)."""
STEPS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """params: (rows, columns) or (stack, rows, columns), sharded on dimension 0 or not at all. Anything else is an error."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon takes matrices and stacks of them, not a parameter of shape {parameter.shape}")
            if isinstance(parameter, DTensor):
                cut = [placement.dim for placement in parameter.placements if isinstance(placement, Shard)]
                if any(cut):
                    raise ValueError(f"Muon takes parameters sharded on dimension 0, not on {cut}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step. Collective over the ranks that share a parameter."""
        assert closure is None, "no closure is evaluated"
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter.grad)
                state["momentum"].lerp_(parameter.grad, 1 - momentum)
                step = _own_direction(parameter.grad.lerp(state["momentum"], momentum))
                scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
                own(parameter)[0].mul_(1 - rate * group["weight_decay"]).add_(step, alpha=-rate * scale)


def _own_direction(update: Tensor) -> Tensor:
    """Of this rank: rows of O(update), or whole matrices of a stack."""
    local, rows = own(update)
    if update.ndim == 3 or not isinstance(update, DTensor):
        return orthogonal(local).to(local.dtype)
    return orthogonal(update.full_tensor())[rows].to(local.dtype)


def orthogonal(matrices: Tensor) -> Tensor:
    """(…, rows, columns) → bfloat16 of the same shape with singular values in about [0.7, 1.2], by Newton-Schulz.

    In bfloat16, which the iteration tolerates: its fixed points attract.
    """
    x: Tensor = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x
