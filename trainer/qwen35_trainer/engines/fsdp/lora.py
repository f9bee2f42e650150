"""Low-rank adapters (LoRA, arXiv:2106.09685): y = W·x + (alpha / rank) · B·A·x, and only A and B train.

    A (rank, in)   uniform in ±1/√in, like the initial weights of a linear layer
    B (out, rank)  zero: the first forward pass equals that of the model without adapters

A and B are always float32 here; the weight W may be stored in bfloat16. Adapters are not merged into W: checkpoints and
publications contain only A and B, because W never changes and every process that loads A and B already has W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qwen35_trainer.engines.fsdp.loading import local_part
from qwen35_trainer.manifest import LoRASpec
from qwen35_trainer.manifest.train import LINEAR_LAYERS
from qwen35_trainer.models.adapted_linear import attach, target_layers
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.weights.adapters import DOWN, UP


def add(model: HFModule, settings: LoRASpec) -> None:
    """Attach uninitialised adapters to the target layers of the decoder, and freeze all other parameters.

    Raises ValueError naming every target that is not the name of a linear layer in the decoder. With the default list
    of targets, names that the decoder lacks are ignored.
    """
    names = {
        name.rpartition(".")[2]
        for name, module in text_model(model).layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    missing = sorted(set(settings.targets) - names)
    if missing and settings.targets != LINEAR_LAYERS:
        raise ValueError(
            f"spec.train.lora.targets: no linear layer is called {', '.join(missing)}; the decoder layers have "
            f"{', '.join(sorted(names))}"
        )
    model.requires_grad_(False)
    for layer in target_layers(model, settings.targets).values():
        _adapt(layer, settings)


def initialise(model: HFModule, seed: int) -> None:
    """Set every adapter to its initial values. With the same seed, the values are the same on any number of ranks."""
    with torch.no_grad():
        for index, parameter in enumerate(p for name, p in model.named_parameters() if name.endswith(DOWN)):
            bound = 1 / math.sqrt(parameter.shape[1])
            generator = torch.Generator().manual_seed(seed + index)
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            local, rows = local_part(parameter)
            local.copy_(whole[rows])
        for name, parameter in model.named_parameters():
            if name.endswith(UP):
                local_part(parameter)[0].zero_()


@contextmanager
def adapters_disabled(model: HFModule) -> Iterator[None]:
    """Context manager: the model computes without its adapters, as the base model would."""
    adapted = [module for module in model.modules() if hasattr(module, "adapter_scale")]
    scales = [module.adapter_scale for module in adapted]
    for module in adapted:
        module.adapter_scale = 0.0
    try:
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.adapter_scale = scale


def is_adapter(name: str) -> bool:
    """Whether the parameter called `name` belongs to an adapter."""
    return name.rpartition(".")[2] in (DOWN, UP)


def _adapt(module: nn.Linear, settings: LoRASpec) -> None:
    weight = module.weight
    down, up = (
        torch.empty(shape, dtype=torch.float32, device=weight.device)
        for shape in ((settings.rank, weight.shape[1]), (weight.shape[0], settings.rank))
    )
    attach(module, down, up, settings.alpha / settings.rank)
