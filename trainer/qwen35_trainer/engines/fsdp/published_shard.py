"""The part of a parameter that this rank publishes.

| parameter                           | who publishes it                                                         |
|-------------------------------------|--------------------------------------------------------------------------|
| sharded by rows                     | Each rank publishes the rows that it holds.                              |
| experts divided over an expert mesh | Each rank publishes the rows (experts) that it holds.                    |
| sharded by rows, with copies (HSDP) | The ranks of one copy publish their rows; copies alternate by parameter. |
| not sharded                         | One rank publishes the parameter; ranks alternate by parameter.          |
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transfer_plan import row_range


def published_shard(name: str, parameter: Tensor, dtype: torch.dtype, number: int) -> WeightShard:
    """Return the part of a parameter that this rank publishes, as `dtype`. It is empty if this rank publishes nothing.

    number: index among the published parameters. If several ranks hold the same values, the number decides which of them
    publishes. Raises ValueError for a parameter that is not sharded by rows, so that a rank does not hold consecutive values.
    """
    tensor, shape = parameter.detach(), tuple(parameter.shape)
    if not isinstance(tensor, DTensor):
        publishes = number % dist.get_world_size() == dist.get_rank()
        return WeightShard(name, shape, dtype, 0, tensor if publishes else tensor.flatten()[:0])
    local, mesh = tensor.to_local(), tensor.device_mesh
    publishes, coordinate, rows = True, mesh.get_coordinate(), range(shape[0] if shape else 1)
    assert coordinate is not None, "every rank is in the mesh"
    # From the last mesh dimension to the first: experts are divided over the expert mesh, and then FSDP shards each part.
    for placement, position, size in reversed([*zip(tensor.placements, coordinate, mesh.shape, strict=True)]):
        if isinstance(placement, Replicate):
            publishes &= number % size == position
        elif placement == Shard(0) and len(rows) == shape[0]:
            rows = row_range(shape[0], size, position)
        elif isinstance(placement, _StridedShard) and placement.dim == 0:
            part = row_range(len(rows), size, position)
            rows = rows[part.start : part.stop]
        else:
            raise ValueError(
                f"{name} is sharded as {tensor.placements}; only a parameter that is sharded by rows, and experts that are divided "
                "before, can be published"
            )
    row = math.prod(shape[1:])
    if local.numel() != len(rows) * row:
        raise ValueError(
            f"{name}: this rank holds {local.numel()} values, expected those of rows {rows.start} to {rows.stop}"
        )
    return WeightShard(name, shape, dtype, rows.start * row, local if publishes else local.flatten()[:0])
