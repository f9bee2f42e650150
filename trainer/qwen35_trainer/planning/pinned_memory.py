"""The size of parameters that FSDP has in pinned host memory (`offload.parameters`).

FSDP pins each sharded parameter and each gradient on its own, and PyTorch rounds each block of pinned memory up to a power of two
(ATen/core/CachingHostAllocator.h; docs of torch.cuda.host_memory_stats). torch 2.13 can be set not to round, but then
either takes a free block that may be smaller than the new tensor, or pins new memory for each gradient of each update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qwen35_trainer.catalog.model_sizes import ModelSizes


@dataclass(frozen=True)
class Matrices:
    """Parameters of one shape. FSDP divides their rows over the ranks."""

    rows: int
    columns: int
    count: int
    of_experts: bool = False
    """Whether the rows are experts, which an expert mesh divides first."""


def matrices(shape: ModelSizes) -> Iterator[Matrices]:
    """Yield the parameters of the text model, without vectors, whose blocks are small."""
    linear, full, hidden = shape.linear_layers, shape.full_layers, shape.hidden
    mixed = 2 * shape.linear_keys + shape.linear_values
    yield Matrices(shape.query * (2 if shape.output_gate else 1), hidden, full)
    yield Matrices(shape.key_value, hidden, 2 * full)
    yield Matrices(hidden, shape.query, full)
    yield Matrices(mixed, hidden, linear)
    yield Matrices(mixed, shape.linear_filter, linear)
    yield Matrices(shape.linear_values, hidden, linear)
    yield Matrices(shape.linear_value_heads, hidden, 2 * linear)
    yield Matrices(hidden, shape.linear_values, linear)
    inner = shape.shared_intermediate if shape.experts else shape.intermediate
    yield Matrices(inner, hidden, 2 * shape.layers)
    yield Matrices(hidden, inner, shape.layers)
    yield Matrices(shape.experts, hidden, shape.layers)
    yield Matrices(shape.experts, 2 * shape.expert_intermediate * hidden, shape.layers, of_experts=True)
    yield Matrices(shape.experts, hidden * shape.expert_intermediate, shape.layers, of_experts=True)
    yield Matrices(shape.vocabulary, hidden, 1 if shape.tied else 2)


def rounding(shape: ModelSizes, ranks: int, width: int, expert: int = 1) -> float:
    """Return the pinned bytes of a rank's parameters, as a multiple of their own bytes, at least 1.

    ranks: number of ranks of a copy of the model. width: bytes of each number. expert: number of ranks of the expert mesh.
    """
    exact, pinned = 0.0, 0.0
    for each in matrices(shape):
        if not (each.rows and each.columns and each.count):
            continue
        parts = expert if each.of_experts else 1
        rows = math.ceil(each.rows / parts / (ranks / parts))
        exact += each.count * width * each.rows * each.columns / ranks
        pinned += each.count * 2.0 ** math.ceil(math.log2(width * rows * each.columns))
    return pinned / exact
