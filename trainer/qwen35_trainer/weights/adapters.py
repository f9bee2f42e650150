"""A version of the weights that contains only adapters (LoRA, arXiv:2106.09685 eq. 3).

The process that loads such a version has the base weights already.

    LAYER.lora_A  (rank, in)    LAYER.lora_B  (out, rank)    for each adapted linear layer
    lora_scale    ()            one number for all layers

An adapted layer with the base weight W and the matrices A (lora_A) and B (lora_B) computes W·x + lora_scale · B·A·x.
All other layers compute as in the base model.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

DOWN, UP, SCALE = "lora_A", "lora_B", "lora_scale"


def are_adapters(weights: Mapping[str, Tensor]) -> bool:
    """Return whether `weights` contains LoRA adapters instead of all weights of a model."""
    return SCALE in weights


def adapted(adapters: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the base weights that the adapters change: `LAYER.weight` for each adapted layer."""
    layers = {name.rpartition(".")[0] for name in adapters if name != SCALE}
    return [f"{layer}.weight" for layer in sorted(layers)]


def misfits(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> list[str]:
    """Return a text for each adapted layer with a missing tensor or with shapes that do not fit together.

    base: base weights by name. adapters: tensors of the adapters by name. The shapes of a layer must be (out, in) for
    the base weight, (rank, in) for lora_A and (out, rank) for lora_B. The result is empty if all layers fit.
    """
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
