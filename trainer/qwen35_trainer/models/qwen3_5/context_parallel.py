"""Context parallelism over heads (DeepSpeed-Ulysses, arXiv:2309.14509): the S processes of a group share each sequence.

Outside the mixers (full attention, Gated DeltaNet), each process holds all H heads for l of the L tokens of a row, l =
L / S. Inside a mixer, it holds all L tokens for h of the heads, h = H / S.

             tokens 0…l-1   l…2l-1                heads 0…h-1   h…2h-1
    rank 0   ██████████               to_heads    ████████████                    mixers compute whole
    rank 1                ██████████  ────────►                ████████████       sequences
                                      ◄────────
                                      to_tokens

Every process of the group gets the same `ModelInput`, rows and targets, and returns all scores. In the backward pass,
only the process that computed a score propagates the gradient of that score. Each process therefore has a part of the
gradient of every parameter, and the sum over the group is the gradient, as with data-parallel processes. FSDP2 averages
over all processes of its mesh; an engine that multiplies its loss by the number of these processes gets the sum.

Tokens are padded to a multiple of S. In a packed row the padding is a separate sequence in `boundaries`, because kernels
read the last boundary as the end of the row.

Shapes below: n rows, C channels per head, and S, L, l, H as above.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from qwen35_trainer.data.expert_choices import NO_CHOICE
from qwen35_trainer.models.qwen3_5 import Context, HFModule
from qwen35_trainer.models.qwen3_5.inputs import ModelInput


def head_problems(config: HFModule, ranks: int) -> list[str]:
    """Return why `ranks` processes cannot share the heads of a text model evenly, with the fix. The list
    is empty if they can.

    Full attention may have fewer key/value heads than processes, because key and value heads are repeated
    (`replicate`). Linear attention needs numbers of heads that are divisible by `ranks`, because each process computes
    its own channels of the convolution.
    """
    names = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
    heads = {name: getattr(config, name) for name in names if hasattr(config, name)}
    uneven = [f"{name} {count}" for name, count in heads.items() if count % ranks]
    if not uneven:
        return []
    fitting = " or ".join(str(d) for d in range(1, ranks) if all(count % d == 0 for count in heads.values()))
    return [f"{ranks} processes cannot share {' and '.join(uneven)} evenly; set train.parallelism.context to {fitting}"]


def padded(inputs: ModelInput, group: ProcessGroup) -> ModelInput:
    """Return `inputs` padded on the right, so that the number of tokens of a row is a multiple of the group's size."""
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
    shared = None if inputs.shared is None else inputs.shared.padded(missing)
    choices = inputs.choices
    if choices is not None:
        choices = F.pad(choices, (0, 0, 0, 0, 0, missing), value=NO_CHOICE)
    return replace(
        inputs,
        tokens=F.pad(inputs.tokens, (0, missing)),
        positions=positions,
        boundaries=boundaries,
        pictures=pictures,
        shared=shared,
        choices=choices,
    )


def local_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this process's slice of the tokens of `x`: (rows, tokens, …) → (rows, tokens / size of the group, …)."""
    return x.chunk(group.size(), dim=1)[group.rank()]


def to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange all heads of this process's tokens for this process's heads of all tokens (all-to-all).

    x: (n, l, H, …), n rows of l tokens with H heads. Returns (n, l · S, H / S, …), S the size of the group.
    """
    return _exchange(x.unflatten(2, (group.size(), -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange this process's heads of all tokens for all heads of this process's tokens (all-to-all). The
    inverse of `to_heads`.

    x: (n, L, h, …), n rows of L tokens with h heads. Returns (n, L / S, h · S, …), S the size of the group.
    """
    return _exchange(x.unflatten(1, (group.size(), -1)).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


def replicate(x: Tensor, group: ProcessGroup) -> Tensor:
    """Repeat the G key or value heads of `x` (n, l, G, C) up to lcm(G, S) heads, where S is the size of `group`.

    n: rows, l: tokens, C: channels per head. Grouped-query attention still works: the number of query heads is
    divisible by G and by S, hence by their least common multiple.
    """
    return x.repeat_interleave(group.size() // math.gcd(x.shape[2], group.size()), dim=2)


def local_rows(rows: Tensor, group: ProcessGroup, *, whole: int, share: int) -> tuple[Tensor, Tensor]:
    """Select the scored positions whose tokens this process holds.

    rows: (R,) int64, all R scored positions, as indices into the flattened (n, whole) tokens of n rows.
    whole: number of tokens of a row, with padding to a multiple of the group's size.
    share: number of those tokens that one process holds.

    Returns two int64 tensors of equal length: for each selected position, its index in `rows`, and the index of its token
    in the flattened (n, share) tokens of this process.
    """
    line, column = rows // whole, rows % whole
    selected = (column // share == group.rank()).nonzero().squeeze(1)
    return selected, line[selected] * share + column[selected] % share


def gather_rows(values: Tensor, indices: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return, on every process, `count` values of which each process has some.

    values: the values of this process. indices: their positions in the result. The backward pass does not communicate:
    it gives each process the gradient of its own values.
    """
    return group_sum(values.new_zeros(count).index_copy(0, indices, values), group)


def group_sum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return, on every process, the sum of `values` over the processes of the group (all-reduce).

    The backward pass does not communicate: it passes each process its gradient of the sum unchanged, so no
    gradient is counted twice.
    """
    return _Sum.apply(values, group)  # type: ignore[no-untyped-call]


def _exchange(blocks: Tensor, group: ProcessGroup) -> Tensor:
    return _Exchange.apply(blocks, group)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Sends block s of `blocks` (S, …) to process s of the group's S processes. The backward
    pass sends gradients back.
    """

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
    """Sum over processes, each of which computes and differentiates only its own addend."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, group: ProcessGroup) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
