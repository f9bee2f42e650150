"""A packed row divided into buckets, for functions that do not take the boundaries of its sequences.

Sequences of similar length share a right-padded batch, called a *bucket*. The shortest sequence of a bucket is longer
than half of its longest one. Padding therefore at most doubles the work of a function, and the function is called at
most once for each power of two among the lengths.

    row      a a a b b b b c c c c c c c c c          boundaries 0 3 7 16
    buckets  c c c c c c c c c     b b b b
                                   a a a ·            ·: computed and discarded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """The sequences of a packed row of T tokens, divided into buckets: batches of right-padded sequences."""

    buckets: tuple[Tensor, ...]
    """(b, l) int64 for each bucket of b sequences, the longest of l tokens: the position of each token in the row.
    Entries after a sequence's end are arbitrary."""
    back: Tensor
    """(T,) int64: the position of each token of the row in the concatenation of the flattened buckets."""
    members: tuple[Tensor, ...]
    """(b,) int64 for each bucket: the sequence in each of its rows."""
    real: tuple[Tensor, ...]
    """(b, l) bool for each bucket: false for padding."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Split:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        total, back, taken = int(starts[-1]), torch.empty(int(starts[-1]), dtype=torch.int64), 0
        buckets: list[Tensor] = []
        rows: list[Tensor] = []
        masks: list[Tensor] = []
        for members in similar(lengths):
            longest = lengths[members[0]]
            places = starts[members].unsqueeze(1) + torch.arange(longest)
            real = torch.arange(longest) < torch.tensor([lengths[i] for i in members]).unsqueeze(1)
            back[places[real]] = taken + real.flatten().nonzero().squeeze(1)
            taken += places.numel()
            buckets.append(places.clamp(max=total - 1).to(device))
            rows.append(torch.tensor(members).to(device))
            masks.append(real.to(device))
        return cls(tuple(buckets), back.to(device), tuple(rows), tuple(masks))

    def apply(self, mix: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
        mixed = [mix(*_bucket(tensors, places)).flatten(0, 1) for places in self.buckets]
        return torch.cat(mixed).index_select(0, self.back).unsqueeze(0)

    def scan(
        self, mix: Callable[..., tuple[Tensor, Tensor]], tensors: Sequence[Tensor], states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply a function that has a state to every sequence. Returns the outputs (1, T, …) and the last states.

        mix: called with the state before the first position of b sequences, the mask of their positions (b, l) and the
        tensors (b, l, …). It returns the outputs (b, l, …) and the states after the last real position. tensors: (1, T, …).
        states: (sequences, …) states before the sequences; None: `mix` gets None.
        """
        outputs: list[Tensor] = []
        last: list[Tensor] = []
        for places, members, real in zip(self.buckets, self.members, self.real, strict=True):
            before = None if states is None else states.index_select(0, members)
            output, after = mix(before, real, *_bucket(tensors, places))
            outputs.append(output.flatten(0, 1))
            last.append(after)
        order = torch.cat(self.members).argsort()
        return torch.cat(outputs).index_select(0, self.back).unsqueeze(0), torch.cat(last).index_select(0, order)


def _bucket(tensors: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """Copy the tokens of a bucket from a packed row. tensors: (1, T, …). places: (b, l). Returns (b, l, …) each."""
    return [x[0].index_select(0, places.flatten()).unflatten(0, places.shape) for x in tensors]


def similar(lengths: Sequence[int]) -> list[list[int]]:
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
