"""The positions and boundaries of the sequences of one forward pass, in the forms that mixers need.

A mixer is the attention or the Gated DeltaNet of a layer. All layers of a forward pass share one `SequenceLayout`.

A packed row is split for mixers without a kernel that takes boundaries. Sequences of similar length share a
right-padded batch, called a *bucket*. The shortest sequence of a bucket is longer than half of its longest one.
Padding therefore at most doubles the work of a mixer, and a mixer is called at most once for each power of two
among the lengths.

    row      a a a b b b b c c c c c c c c c          boundaries 0 3 7 16
    buckets  c c c c c c c c c     b b b b
                                   a a a ·            ·: computed and discarded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from qwen35_trainer.models.qwen3_5.router import Membership


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The positions and boundaries of the sequences of one forward pass: n rows, l tokens per row that
    this process holds.
    """

    cos: Tensor
    """(n, l, rotary channels): cosines of the rotary embedding of this process's tokens."""
    sin: Tensor
    """(n, l, rotary channels): sines of the rotary embedding of this process's tokens."""
    boundaries: Tensor | None = None
    """(sequences + 1,) int32: cumulative lengths of the sequences in a packed row; None: each row is
    one right-padded sequence."""
    longest: int = 0
    """Number of tokens of the longest sequence in a packed row."""
    split: Split | None = None
    """Buckets of the sequences of a packed row. None if rows are padded, or if every mixer has a kernel
    that takes boundaries."""
    context_group: ProcessGroup | None = None
    """Processes that each hold a slice of the tokens; None: this process holds all tokens."""
    membership: Membership | None = None
    """The sequence of each token, for the losses of routers; None: these losses are not computed."""

    def apart(self, mix: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply `mix` so that no sequence affects the result of another one.

        mix: a function of right-padded sequences, (sequences, tokens, …). tensors: (rows, tokens, …), where the rows
        are padded sequences or a single packed row. The result has the same first two dimensions as `tensors`.
        """
        if self.boundaries is None:
            return mix(*tensors)
        assert self.split is not None, "a packed row without kernels was not split"
        return self.split.apply(mix, tensors)


@dataclass(frozen=True, eq=False)
class Split:
    """The sequences of a packed row of T tokens, divided into buckets: batches of right-padded sequences."""

    buckets: tuple[Tensor, ...]
    """(b, l) int64 for each bucket of b sequences, the longest of l tokens: the position of each token in the row.
    Entries after a sequence's end are arbitrary."""
    back: Tensor
    """(T,) int64: the position of each token of the row in the concatenation of the flattened buckets."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Split:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        total, back, taken = int(starts[-1]), torch.empty(int(starts[-1]), dtype=torch.int64), 0
        buckets: list[Tensor] = []
        for members in _similar(lengths):
            longest = lengths[members[0]]
            places = starts[members].unsqueeze(1) + torch.arange(longest)
            real = torch.arange(longest) < torch.tensor([lengths[i] for i in members]).unsqueeze(1)
            back[places[real]] = taken + real.flatten().nonzero().squeeze(1)
            taken += places.numel()
            buckets.append(places.clamp(max=total - 1).to(device))
        return cls(tuple(buckets), back.to(device))

    def apply(self, mix: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
        mixed = [
            mix(*(x[0].index_select(0, places.flatten()).unflatten(0, places.shape) for x in tensors)).flatten(0, 1)
            for places in self.buckets
        ]
        return torch.cat(mixed).index_select(0, self.back).unsqueeze(0)


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Divide sequences into buckets of similar length, and return the indices of each bucket's
    sequences, longest first.

    The shortest sequence of a bucket is longer than half of the bucket's longest sequence.
    """
    runs: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if runs and 2 * lengths[i] > lengths[runs[-1][0]]:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
