"""Sequence parallelism over heads (DeepSpeed-Ulysses, arXiv:2309.14509): S processes share each sequence.

Outside the mixers each process holds a slice of the tokens; inside, all tokens of a share of the heads.

             tokens 0…l-1   l…2l-1                heads 0…h-1   h…2h-1
    rank 0   ██████████               to_heads    ████████████                    a mixer sees whole sequences
    rank 1                ██████████  ────────►                ████████████       and never knows
                                      ◄────────
                                      to_tokens

Every process of the group gets the same `ModelInput`, rows and targets, and gets all scores. The backward pass sends
the gradient of a score to the process that computed it and nowhere else, so each process holds a *share* of the
gradient of every parameter, and the gradient is the sum over the group, as it is over data-parallel processes. FSDP2
averages over all processes of its mesh; an engine that multiplies its loss by their number gets the sum.

Tokens are padded to a multiple of S. Of a packed row the padding is a sequence of its own in `boundaries`: kernels read
the last boundary as the end of the row.
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
    """What keeps `ranks` processes from sharing the heads of a text model, and how many could; none: nothing.

    Key/value heads of full attention may be fewer than processes, they are repeated. Those of linear attention may not:
    their part of the convolution's and the projection's channels is the process's own.
    """
    names = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
    heads = {name: getattr(config, name) for name in names}
    uneven = [f"{name} {count}" for name, count in heads.items() if count % ranks]
    if not uneven:
        return []
    fitting = " or ".join(str(d) for d in range(1, ranks) if all(count % d == 0 for count in heads.values()))
    return [f"{ranks} processes cannot share {' and '.join(uneven)} evenly; set train.parallelism.context to {fitting}"]


def padded(inputs: ModelInput, group: ProcessGroup) -> ModelInput:
    """`inputs` with as many more tokens to the right as make the row's length a multiple of the group's size."""
    missing = -inputs.tokens.shape[1] % group.size()
    if not missing:
        return inputs
    boundaries, pictures = inputs.boundaries, inputs.pictures
    if pictures is not None:
        pictures = replace(pictures, token_types=F.pad(pictures.token_types, (0, missing)))
    if boundaries is not None:
        boundaries = torch.cat((boundaries, boundaries[-1:] + missing))
    # Positions of its own, from 0: the padding of a packed row is a sequence like any other.
    places = torch.arange(missing, device=inputs.positions.device).view(1, -1, 1)
    positions = torch.cat((inputs.positions, places.expand(len(inputs.positions), -1, 4)), dim=1)
    return ModelInput(F.pad(inputs.tokens, (0, missing)), positions, boundaries, pictures)


def own(x: Tensor, group: ProcessGroup) -> Tensor:
    """The slice of the tokens of (n, L, …) that this process holds."""
    return x.chunk(group.size(), dim=1)[group.rank()]


def to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """(n, l, H, …) of this process's tokens → (n, L, H / S, …) of all tokens."""
    return _exchange(x.unflatten(2, (group.size(), -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """(n, L, H / S, …) of all tokens → (n, l, H, …) of this process's tokens."""
    return _exchange(x.unflatten(1, (group.size(), -1)).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


def replicate(x: Tensor, group: ProcessGroup) -> Tensor:
    """Key or value heads (n, l, G, C), each repeated as often as makes their number divisible among the group.

    The heads that share one in grouped-query attention still find it: with H divisible by S and by G, it is by the
    repeated number too, which is their least common multiple.
    """
    return x.repeat_interleave(group.size() // math.gcd(x.shape[2], group.size()), dim=2)


def own_rows(rows: Tensor, group: ProcessGroup, *, whole: int, share: int) -> tuple[Tensor, Tensor]:
    """Which of the scored rows this process computes, and where they are in its own (n, l) tokens, flattened.

    rows: (R,) flat positions over (n, whole).  share: tokens l of a slice.  Returns two (own,) int64: indices into
    `rows`, and flat positions over (n, l).
    """
    line, column = rows // whole, rows % whole
    mine = (column // share == group.rank()).nonzero().squeeze(1)
    return mine, line[mine] * share + column[mine] % share


def gather_rows(values: Tensor, mine: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """All (count,) values on every process, each from the one that has it. Backward: the gradient of one's own."""
    return total(values.new_zeros(count).index_copy(0, mine, values), group)


def total(values: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the group, on every process of it. Backward: the gradient of one's own addends."""
    return _Sum.apply(values, group)  # type: ignore[no-untyped-call]


def _exchange(blocks: Tensor, group: ProcessGroup) -> Tensor:
    return _Exchange.apply(blocks, group)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Block s of (S, …) goes to process s. The transpose of that is the same exchange."""

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
    """A sum over processes whose every addend is computed, and differentiated, on one of them only."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, group: ProcessGroup) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
