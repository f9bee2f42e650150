"""A version of the weights that contains only adapters (LoRA, arXiv:2106.09685 eq. 3). The process that loads it has the base weights already.

    LAYER.lora_A  (rank, in)    LAYER.lora_B  (out, rank)    for each linear layer that is adapted
    lora_scale    ()            the same for all layers

The adapted layers compute W·x + scale · B·A·x. Everything else is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

DOWN, UP, SCALE = "lora_A", "lora_B", "lora_scale"


def are_adapters(weights: Mapping[str, Tensor]) -> bool:
    """Return whether these weights are low-rank adapters, which need the weights of a base model."""
    return SCALE in weights


def adapted(adapters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the base weights that the adapters change."""
    layers = {name.rpartition(".")[0] for name in adapters if name != SCALE}
    return [f"{layer}.weight" for layer in sorted(layers)]


def misfits(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> list[str]:
    """Return a phrase for each layer whose adapters do not fit `base`, the weights by name. Empty if all fit."""
    problems = []
    for name in adapted(adapters):
        layer = name.removesuffix("weight")
        parts = (base.get(name), adapters.get(layer + DOWN), adapters.get(layer + UP))
        shapes = tuple(None if part is None else tuple(part.shape) for part in parts)
        match shapes:
            case (out, columns), (rank, into), (rows, width) if (out, columns, rank) == (rows, into, width):
                continue
        problems.append(f"{name} {shapes[0]} with {DOWN} {shapes[1]} and {UP} {shapes[2]}")
    return problems
