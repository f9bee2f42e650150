"""A stand-in for the FusedAdam of Transformer Engine, which needs a GPU: it keeps its count of steps where FusedAdam does.

Transformer Engine 2: `param_groups[i]["step"]`, an integer, absent before the first step and in groups without parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim import Optimizer


class FusedAdam(Optimizer):
    """AdamW with decoupled weight decay."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **_: object) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                assert state.keys() == {"exp_avg", "exp_avg_sq"}
                (first, second), number = group["betas"], group["step"]
                mean = state["exp_avg"].lerp_(parameter.grad, 1 - first) / (1 - first**number)
                square = state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second) / (1 - second**number)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


@contextmanager
def installed() -> Iterator[None]:
    """megatron-core finds FusedAdam, as where Transformer Engine is installed."""
    with (
        patch.object(optimizer, "Adam", FusedAdam),
        patch.object(distrib_optimizer, "Adam", FusedAdam),
        patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False),
    ):
        yield
