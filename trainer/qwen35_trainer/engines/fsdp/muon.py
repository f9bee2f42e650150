"""The Muon optimizer: it orthogonalises the momentum of each matrix, and updates the weights by the result.

    M ← μ·M + (1 - μ)·G        U = (1 - μ)·G + μ·M  (Nesterov)        W ← (1 - η·λ)·W - 0.2·√max(rows, columns)·η·O(U)

W is a weight matrix, G its gradient, M its momentum, μ the momentum coefficient, η the learning rate and λ the weight
decay. O(U) approximates the semi-orthogonal matrix nearest to U: the singular values of O(U) are in about [0.7, 1.2]
(Jordan 2024, kellerjordan.github.io/posts/muon). The factor 0.2·√max(rows, columns) gives a step the same root mean
square as AdamW's, so that a learning rate and weight decay tuned for AdamW apply (Liu et al., arXiv:2502.16982, section
2.2). The arithmetic is that of torch.optim.Muon with match_rms_adamw. In addition, weights may be sharded, and may be
stacks of matrices.

For a sharded matrix, every rank gathers the whole update in bfloat16, orthogonalises it, and keeps its own rows. The iteration
needs the whole matrix, and repeating the iteration on every rank costs less than a second exchange. A stack (experts,
rows, columns) is sharded by experts, with and without an expert mesh: each rank has whole matrices and gathers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from qwen35_trainer.engines.fsdp.loading import local_part

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the polynomial of degree five in the Newton-Schulz iteration. The polynomial is steepest at 0, so
that small singular values grow quickly (Jordan 2024)."""
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """The Muon optimizer of matrices and stacks of matrices.

    params: (rows, columns) or (stack, rows, columns), sharded on dimension 0 or not sharded. The constructor raises
    ValueError for a parameter of another shape or sharding.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon takes matrices and stacks of them, not a parameter of shape {parameter.shape}")
            if isinstance(parameter, DTensor):
                cut = [each.dim for each in parameter.placements if isinstance(each, Shard | _StridedShard)]
                if any(cut):
                    raise ValueError(f"Muon takes parameters sharded on dimension 0, not on {cut}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective over the ranks that share the parameters.

        closure: must be None.
        """
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
                local_part(parameter)[0].mul_(1 - rate * group["weight_decay"]).add_(step, alpha=-rate * scale)


def _own_direction(update: Tensor) -> Tensor:
    """Return this rank's part of the orthogonalised update: its rows of a matrix, or its matrices of a stack.

    Collective for a sharded matrix.
    """
    local, rows = local_part(update)
    if update.ndim == 3 or not isinstance(update, DTensor):
        return orthogonal(local).to(local.dtype)
    # The iteration rounds to bfloat16 anyway: rounded before the exchange, the update is half as large.
    rounded = update.bfloat16()
    assert isinstance(rounded, DTensor)
    return orthogonal(rounded.full_tensor())[rows].to(local.dtype)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return each matrix of (…, rows, columns) orthogonalised by the Newton-Schulz iteration.

    The result is bfloat16, with singular values in about [0.7, 1.2]. The precision of bfloat16 is enough, because each
    step of the iteration moves the singular values towards this range again.
    """
    x: Tensor = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x
