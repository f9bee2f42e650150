"""Whole tensors of those that are sharded over the ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from qwen35_trainer.engines.fsdp.loading import local_part
from tests.distributed import wire


@torch.no_grad()
def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors by name, each with the parts of all ranks. Collective.

    Not `DTensor.full_tensor`: its functional collectives over gloo have ended a process with SIGSEGV (in `wait_tensor`).
    """
    local = {name: local_part(tensor.detach()) for name, tensor in tensors.items()}
    of_ranks = [b""] * dist.get_world_size()
    dist.all_gather_object(of_ranks, wire.dumps(local))
    results = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    for parts in of_ranks:
        for name, (part, where) in wire.loads(parts).items():
            results[name][where] = part
    return results
