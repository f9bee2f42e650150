"""Finds losses and advantages by name: registered ones, or functions of the user, `module:function`.

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
    """Return the loss called `name`: a registered one, or the user's `module:function`.

    Raises ValueError if no loss is registered by this name, and ImportError or AttributeError if the user's function cannot
    be imported. When the user's function is called, a result of a wrong type or shape raises ValueError.
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

    Raises ValueError if no advantage is registered by this name, and ImportError or AttributeError if the user's function
    cannot be imported. When the user's function is called, a result of a wrong type or shape raises ValueError.
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
    """Return what a user's function returned, with 0 on padding.

    Raises ValueError if it is not a tensor of the mask's shape.
    """
    if not isinstance(result, Tensor):
        raise ValueError(f"{target} returned {type(result).__name__}. Return a tensor, one number for each token.")  # noqa: TRY004
    if result.shape != mask.shape:
        raise ValueError(
            f"{target} returned shape {tuple(result.shape)}. Return {tuple(mask.shape)}, the shape of the mask."
        )
    return zero_padding(result, mask)
