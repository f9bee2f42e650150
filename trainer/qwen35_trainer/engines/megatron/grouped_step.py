"""An optimizer's step, by one group of parameters after another, so that the moments of only one group need to be on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

GROUP_NUMBERS = 2**27
"""Maximum number of values of the parameters of a group; a larger parameter is a group of its own. Their moments take 1 GiB."""


def groups_of(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divide parameters into groups, in their order."""
    groups: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        size += parameter.numel()
        if not groups or size > GROUP_NUMBERS:
            groups.append([])
            size = parameter.numel()
        groups[-1].append(parameter)
    return groups


def step_by_groups(
    optimizer: Optimizer,
    step: Callable[[], object],
    groups: Mapping[int, Sequence[Tensor]],
    begin: Callable[[int], None],
) -> None:
    """Make one step of an optimizer.

    step: the optimizer's own step, which leaves out parameters without a gradient, as those of PyTorch's Adam and of FusedAdam. groups:
    all parameters of the optimizer, in groups with numbers. begin: called with the number of each group before its parameters step.
    """
    gradients = {parameter: parameter.grad for group in groups.values() for parameter in group}
    # FusedAdam counts its calls, and not the steps of each parameter.
    counts = [group.get("step") for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = None
    for number, group in groups.items():
        for settings, count in zip(optimizer.param_groups, counts, strict=True):
            if count is not None:
                settings["step"] = count
            elif "step" in settings:
                del settings["step"]
        begin(number)
        for parameter in group:
            parameter.grad = gradients[parameter]
        step()
        for parameter in group:
            parameter.grad = None
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
