"""Load the weights of an engine so that each rank gets its own shard.

source of weights    how they are loaded
random               Every rank builds the whole model from the same seed, then shards it. Such models are small.
a folder             Every rank builds the model without values, shards it, and reads its own rows from the files.
                     No rank holds the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles, check_finite


def fill(model: HFModule, files: CheckpointFiles, device: torch.device, *, offloaded: bool) -> None:
    """Load the values of `files` into a sharded model that is on the meta device. Each rank reads only its own rows.

    device: where the model will be. offloaded: whether parameters stay in host memory instead. Parameters that are
    not in the files (adapters) stay uninitialised. Raises CheckpointUnusable naming every tensor whose rows on this
    rank are not finite.
    """
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if offloaded else device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer
    check_finite(files.folder, _read(model, files))


def _read(model: HFModule, files: CheckpointFiles) -> Iterator[tuple[str, Tensor]]:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in files.tensors:
                local, rows = local_part(parameter)
                local.copy_(files.read(name, *rows))
                yield name, local


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the part of a parameter that this rank holds, and the slices of this part in the whole parameter.

    For a parameter that is not sharded, return the parameter and no slices.
    """
    if not isinstance(parameter, DTensor):
        return parameter, ()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return parameter.to_local(), part
