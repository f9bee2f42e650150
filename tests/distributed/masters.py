"""What an engine trains, as the library's model has it."""

import torch
from torch import Tensor

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.weights.adapters import DOWN, UP
from tests.distributed.whole import whole


@torch.no_grad()
def masters(engine: FSDPEngine) -> dict[str, Tensor]:
    """All weights by name, whole, in the type that each rests in, with adapters added to what they adapt. Collective."""
    weights = whole(engine._model.state_dict())
    for name in [name for name in weights if name.endswith(DOWN)]:
        layer, down, up = name.removesuffix(DOWN), weights.pop(name), weights.pop(name.removesuffix(DOWN) + UP)
        scale = engine._model.get_submodule(layer.rstrip(".")).adapter_scale
        weight = weights[f"{layer}weight"]
        weights[f"{layer}weight"] = (weight.float() + scale * (up @ down)).to(weight.dtype)
    return weights
