"""An optimizer's step that updates one group of parameters after another.

AdamW's moments then need to be on the device for only one group at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

GROUP_NUMBERS = 2**27
"""Maximum number of values of the parameters of a group; a larger parameter is a group of its own. Their moments take 1 GiB."""


def groups_of(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divide parameters into consecutive groups of at most `GROUP_NUMBERS` values.

    A larger parameter is a group of its own.
    """
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
    """Make one step of an optimizer, by one call of `step` for each group of parameters.

    step: the optimizer's own step. It must skip parameters without a gradient, as PyTorch's Adam and FusedAdam do.
    groups: number of a group → its parameters. The groups contain all parameters of the optimizer.
    begin: called with the number of each group, before the group's parameters are updated.
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
