"""The norm of the whole gradient, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from qwen35_trainer.engines.fsdp.loading import local_part


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], largest: float, *, copies: int) -> float:
    """Scale the gradients down to the norm `largest` if their norm is larger and finite. Returns the norm before.

    Collective. parameters: all trained parameters. Each is sharded over all ranks of a copy of the model, so the ranks sum the
    squares of their own parts. PyTorch's `clip_grad_norm_` requires that all gradients are on the same mesh, and those of
    experts may be on another one. copies: number of copies of the model (HSDP); all have the same gradient.
    """
    gradients = [local_part(each.grad)[0] for each in parameters if each.grad is not None]
    # In float64 the square of every float32 norm is finite.
    square = nn.utils.get_total_norm(gradients).cpu().double().square() / copies
    dist.all_reduce(square)
    norm = math.sqrt(float(square))
    factor = largest / (norm + 1e-6)  # as in `clip_grad_norm_`
    if math.isfinite(norm) and factor < 1:
        torch._foreach_mul_(gradients, factor)
    return norm
