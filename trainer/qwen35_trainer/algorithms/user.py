"""Looks up losses and advantages: built-in functions by their registered name, functions of a user by `module:function`.

function of a user    argument           result
loss                  LossInputs         Tensor (N, T), the loss of each token
advantage             AdvantageInputs    Tensor (N, T), the advantage of each token

`losses.py` and `advantages.py` define the argument types. Results for padding are ignored. The train workers import the
user's modules.
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from qwen35_trainer.algorithms.advantages import AdvantageFunction, AdvantageInputs, advantage
from qwen35_trainer.algorithms.losses import LossFunction, LossInputs, LossOutput, policy_loss
from qwen35_trainer.algorithms.masking import zero_padding


def is_user_function(name: str) -> bool:
    """Return whether `name` is the name of a function of the user, as `module:function`."""
    return ":" in name


def loss_of(name: str) -> LossFunction:
    """Return the loss called `name`: a registered one, or the user's `module:function`.

    Raises ValueError if no loss is registered by this name, and ImportError or AttributeError if the user's function
    cannot be imported. The returned function raises ValueError if the result of the user's function has a wrong type or
    shape, or lacks a gradient.
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

    Raises ValueError if no advantage is registered by this name, and ImportError or AttributeError if the user's
    function cannot be imported. The returned function raises ValueError if the result of the user's function has a
    wrong type or shape.
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
    """Return the result of a user's function with 0 on padding.

    Raises ValueError if the result is not a tensor of the mask's shape.
    """
    if not isinstance(result, Tensor):
        raise ValueError(f"{target} returned {type(result).__name__}. Return a tensor, one number for each token.")  # noqa: TRY004
    if result.shape != mask.shape:
        raise ValueError(
            f"{target} returned shape {tuple(result.shape)}. Return {tuple(mask.shape)}, the shape of the mask."
        )
    return zero_padding(result, mask)
