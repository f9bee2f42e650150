"""A linear layer with a low-rank adapter (LoRA, arXiv:2106.09685): y = W·x + scale · B·A·x.

W is frozen; A and B train. They are parameters of the layer, next to its weight, so that the modules and their names
stay those of transformers, and FSDP shards A and B together with their layer. The adapter is not merged into the
weight: a bfloat16 weight cannot hold a change below half of the spacing of bfloat16 numbers, so small changes would be
lost, and replicas would generate with the base model.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType

from torch import Tensor, nn
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.weights.adapters import DOWN, UP


def target_layers(model: HFModule, targets: Collection[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of the decoder that get adapters: full name of the layer in the model → layer.

    targets: last parts of names, such as q_proj. A layer is returned if the last part of its full name is a target.
    """
    of_decoder = set(text_model(model).layers.modules())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in of_decoder and name.rpartition(".")[2] in targets
    }


def attach(layer: nn.Linear, down: Tensor, up: Tensor, scale: float) -> None:
    """Attach an adapter to `layer`. An adapter that the layer already has is replaced.

    down: A (rank, in). up: B (out, rank). scale: factor of B·A·x.
    """
    for name, matrix in ((DOWN, down), (UP, up)):
        layer.register_parameter(name, nn.Parameter(matrix))
    layer.adapter_scale = scale  # type: ignore[assignment]
    layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def detach(layer: nn.Linear) -> None:
    """Remove the adapter of `layer`, which must have one."""
    for name in (DOWN, UP, "adapter_scale", "forward"):
        delattr(layer, name)


def _forward(layer: HFModule, x: Tensor) -> Tensor:
    base_output = F.linear(x, layer.weight, layer.bias)
    if layer.adapter_scale == 0:
        return base_output
    down, up = layer.get_parameter(DOWN), layer.get_parameter(UP)
    adapted: Tensor = base_output + layer.adapter_scale * F.linear(F.linear(x, down), up)
    return adapted
