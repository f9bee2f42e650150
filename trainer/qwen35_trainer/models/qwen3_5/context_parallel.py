"""Context parallelism over heads (DeepSpeed-Ulysses, arXiv:2309.14509): the S processes of a group share each sequence.

Outside the mixers each process holds a slice of the tokens. Inside a mixer it holds all tokens of a share of the heads.

             tokens 0…l-1   l…2l-1                heads 0…h-1   h…2h-1
    rank 0   ██████████               to_heads    ████████████                    mixers compute whole
    rank 1                ██████████  ────────►                ████████████       sequences
                                      ◄────────
                                      to_tokens

Every process of the group gets the same `ModelInput`, rows and targets, and returns all scores. The backward pass sends
the gradient of a score only to the process that computed it, so each process holds a *share* of the gradient of every
parameter, and the gradient is the sum over the group, as over data-parallel processes. FSDP2 averages over all processes
of its mesh; an engine that multiplies its loss by their number gets the sum.

Tokens are padded to a multiple of S. In a packed row the padding is a separate sequence in `boundaries`, because kernels
read the last boundary as the end of the row.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import Context, HFModule
from qwen35_trainer.models.qwen3_5.inputs import ModelInput


def head_problems(config: HFModule, ranks: int) -> list[str]:
    """Return the reasons why `ranks` processes cannot share the heads of a text model, each with a fix; empty if they can.

    Full attention may have fewer key/value heads than processes, because key and value heads are repeated. Linear attention
    may not have fewer heads, because each process has its part of the channels of the convolution and the projection.
    """
    names = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
    heads = {name: getattr(config, name) for name in names}
    uneven = [f"{name} {count}" for name, count in heads.items() if count % ranks]
    if not uneven:
        return []
    fitting = " or ".join(str(d) for d in range(1, ranks) if all(count % d == 0 for count in heads.values()))
    return [f"{ranks} processes cannot share {' and '.join(uneven)} evenly; set train.parallelism.context to {fitting}"]


def padded(inputs: ModelInput, group: ProcessGroup) -> ModelInput:
    """Pad `inputs` to the right, to a length that is a multiple of the group's size."""
    missing = -inputs.tokens.shape[1] % group.size()
    if not missing:
        return inputs
    boundaries, pictures = inputs.boundaries, inputs.pictures
    if pictures is not None:
        pictures = replace(pictures, token_types=F.pad(pictures.token_types, (0, missing)))
    if boundaries is not None:
        boundaries = torch.cat((boundaries, boundaries[-1:] + missing))
    # Positions start at 0, because the padding of a packed row is a separate sequence.
    places = torch.arange(missing, device=inputs.positions.device).view(1, -1, 1)
    positions = torch.cat((inputs.positions, places.expand(len(inputs.positions), -1, 4)), dim=1)
    return ModelInput(F.pad(inputs.tokens, (0, missing)), positions, boundaries, pictures)


def local_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the slice of (n, L, …) with the tokens of this process."""
    return x.chunk(group.size(), dim=1)[group.rank()]


def to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange (n, l, H, …) of this process's tokens for (n, L, H / S, …) of all tokens."""
    return _exchange(x.unflatten(2, (group.size(), -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange (n, L, H / S, …) of all tokens for (n, l, H, …) of this process's tokens."""
    return _exchange(x.unflatten(1, (group.size(), -1)).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


def replicate(x: Tensor, group: ProcessGroup) -> Tensor:
    """Repeat key or value heads (n, l, G, C) until their number is divisible by the size of the group.

    Grouped-query attention still works: H is divisible by S and by G, so it is divisible by the new number of heads too,
    which is their least common multiple.
    """
    return x.repeat_interleave(group.size() // math.gcd(x.shape[2], group.size()), dim=2)


def local_rows(rows: Tensor, group: ProcessGroup, *, whole: int, share: int) -> tuple[Tensor, Tensor]:
    """Select the scored rows whose tokens this process holds.

    rows: (R,) flat positions in the (n, whole) tokens of all processes.  share: l, the length of a process's slice.
    Returns two (selected,) int64: indices into `rows`, and flat positions in this process's (n, l) tokens.
    """
    line, column = rows // whole, rows % whole
    selected = (column // share == group.rank()).nonzero().squeeze(1)
    return selected, line[selected] * share + column[selected] % share


def gather_rows(values: Tensor, indices: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Combine values that are spread over the group: each process passes its `values` and their `indices`.

    Returns all (count,) values on every process. The backward pass gives each process the gradient of its own values.
    """
    return group_sum(values.new_zeros(count).index_copy(0, indices, values), group)


def group_sum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return, on every process, the sum of `values` over the processes of the group.

    The backward pass gives each process the gradient of its own `values`.
    """
    return _Sum.apply(values, group)  # type: ignore[no-untyped-call]


def _exchange(blocks: Tensor, group: ProcessGroup) -> Tensor:
    return _Exchange.apply(blocks, group)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Sends block s of (S, …) to process s. The backward pass exchanges gradients in the same way."""

    @staticmethod
    def forward(ctx: Context, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """A sum over processes in which each addend is computed and differentiated on one process only."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, group: ProcessGroup) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
