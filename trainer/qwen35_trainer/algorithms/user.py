"""Losses and advantages by name: those of the registries, or the user's own, `module:function`.

    loss       LossInputs       ─► Tensor (N, T), the loss of each token
    advantage  AdvantageInputs  ─► Tensor (N, T)

The types of the user's functions are those of `losses.py` and `advantages.py`. What they return for padding is not used. Their
modules are imported in the train workers.
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .advantages import Advantage, AdvantageInputs, advantage
from .losses import LossInputs, LossOutput, PolicyLoss, policy_loss
from .masking import zero_padding


def is_own(name: str) -> bool:
    """Whether a name is `module:function`."""
    return ":" in name


def loss_of(name: str) -> PolicyLoss:
    """The loss called `name`. Raises ValueError for an unknown name.

    For the user's own also ImportError and AttributeError; when called, ValueError for a result of another kind or shape.
    """
    if not is_own(name):
        return policy_loss(name)
    function = _imported(name)

    def own(inputs: LossInputs) -> LossOutput:
        loss = _checked(name, function(inputs), inputs.mask)
        if inputs.log_probs.requires_grad and not loss.requires_grad:
            raise ValueError(f"{name} returned a loss without a gradient. Compute it from log_probs, without detach.")
        return LossOutput(loss, metrics={})

    return own


def advantage_of(name: str) -> Advantage:
    """The advantage called `name`. Raises as `loss_of`."""
    if not is_own(name):
        return advantage(name)
    function = _imported(name)

    def own(inputs: AdvantageInputs) -> Tensor:
        return _checked(name, function(inputs), inputs.mask).float().detach()

    return own


def _imported(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _checked(target: str, result: object, mask: Tensor) -> Tensor:
    """The result, with 0 on padding."""
    if not isinstance(result, Tensor):
        raise ValueError(f"{target} returned {type(result).__name__}. Return a tensor, one number for each token.")  # noqa: TRY004
    if result.shape != mask.shape:
        raise ValueError(
            f"{target} returned shape {tuple(result.shape)}. Return {tuple(mask.shape)}, the shape of the mask."
        )
    return zero_padding(result, mask)
