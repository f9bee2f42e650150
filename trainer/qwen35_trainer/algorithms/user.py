"""Losses and advantages by name: from the registries, or functions of the user, `module:function`.

    loss       LossInputs       ─► Tensor (N, T), the loss of each token
    advantage  AdvantageInputs  ─► Tensor (N, T)

The argument types are those of `losses.py` and `advantages.py`. Results for padding are ignored. The modules are
imported in the train workers.
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from qwen35_trainer.algorithms.advantages import AdvantageFunction, AdvantageInputs, advantage
from qwen35_trainer.algorithms.losses import LossFunction, LossInputs, LossOutput, policy_loss
from qwen35_trainer.algorithms.masking import zero_padding


def is_user_function(name: str) -> bool:
    """Whether `name` is a function of the user, `module:function`."""
    return ":" in name


def loss_of(name: str) -> LossFunction:
    """Return the loss called `name`. Raises ValueError for an unknown name.

    A function of the user can also raise ImportError and AttributeError here; when called, the returned function raises
    ValueError for a result of the wrong type or shape.
    """
    if not is_user_function(name):
        return policy_loss(name)
    function = _imported(name)

    def checked(inputs: LossInputs) -> LossOutput:
        loss = _check_result(name, function(inputs), inputs.mask)
        if inputs.log_probs.requires_grad and not loss.requires_grad:
            raise ValueError(f"{name} returned a loss without a gradient. Compute it from log_probs, without detach.")
        return LossOutput(loss, metrics={})

    return checked


def advantage_of(name: str) -> AdvantageFunction:
    """Return the advantage function called `name`: a registered one, or the user's `module:function`.

    Raises the same errors as `loss_of`.
    """
    if not is_user_function(name):
        return advantage(name)
    function = _imported(name)

    def checked(inputs: AdvantageInputs) -> Tensor:
        return _check_result(name, function(inputs), inputs.mask).float().detach()

    return checked


def _imported(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _check_result(target: str, result: object, mask: Tensor) -> Tensor:
    """Check the type and shape of a result, and return it with 0 on padding."""
    if not isinstance(result, Tensor):
        raise ValueError(f"{target} returned {type(result).__name__}. Return a tensor, one number for each token.")  # noqa: TRY004
    if result.shape != mask.shape:
        raise ValueError(
            f"{target} returned shape {tuple(result.shape)}. Return {tuple(mask.shape)}, the shape of the mask."
        )
    return zero_padding(result, mask)
