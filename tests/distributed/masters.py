"""What an engine trains, as the library's model has it."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.weights.adapters import DOWN, UP


@torch.no_grad()
def masters(engine: FSDPEngine) -> dict[str, Tensor]:
    """All weights by name, whole, in the type that each rests in, with adapters added to what they adapt. Collective."""
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in engine._model.state_dict().items()
    }
    for name in [name for name in whole if name.endswith(DOWN)]:
        layer, down, up = name.removesuffix(DOWN), whole.pop(name), whole.pop(name.removesuffix(DOWN) + UP)
        scale = engine._model.get_submodule(layer.rstrip(".")).adapter_scale
        weight = whole[f"{layer}weight"]
        whole[f"{layer}weight"] = (weight.float() + scale * (up @ down)).to(weight.dtype)
    return whole
