"""Packed rows in which several responses share the tokens of one prompt (prefix grouping, arXiv:2506.05433).

    sequences     p p p p a a a │ p p p p b b │ q q c         each response with its own copy of the prompt
    row           p p p p│a a a│b b│q q c                     `p` is computed once; `a` and `b` continue it
                  segments 0 │ 1 │ 2 │ 3                      prompts: –, 0, 0, –       last segments: 1, 2, 3

A *segment* is a run of adjacent tokens of the row. It begins a sequence, or it *continues* an earlier segment, the prompt. A
sequence is one segment, or a prompt and the segment that continues it. Everything that a layer computes for single tokens
(projections, norms, MLP, experts, output layer) is computed once for each token of the row. Only the mixers look at other
tokens:

    convolution of width W    reads the last W - 1 inputs of the prompt before those of the segment
    gated delta rule          begins from the state that the prompt leaves
    full attention            reads the keys and values of the prompt, and those of the segment up to each position

The values are those of separate sequences, because every mixer is causal: a token of the prompt depends on no response. All
of the above are indexed copies, so that the backward pass adds the gradients of all responses to those of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5.buckets import Split, similar


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """The segments of a packed row of T tokens, and the n sequences of L tokens together that they make."""

    lengths: tuple[int, ...]
    """Number of tokens of each segment, at least 1. Their sum is T."""
    prompts: tuple[int | None, ...]
    """For each segment, the earlier segment that it continues; None: it begins a sequence."""
    last_segments: tuple[int, ...]
    """The last segment of each of the n sequences."""
    leaders: tuple[int, ...]
    """For each of the n sequences, the first sequence that has the same prompt, possibly itself."""
    tokens: Tensor
    """(T,) int64: position of each token of the row in the row of n separate sequences."""
    places: Tensor
    """(L,) int64: position in the row of each token of the n separate sequences."""

    @classmethod
    def of(cls, prompts: Sequence[int], lengths: Sequence[int], leaders: Sequence[int]) -> SharedPrompts | None:
        """Divide n sequences into segments. Returns None if no two sequences share a prompt.

        prompts: number of tokens of each sequence's prompt. lengths: number of tokens of each sequence, prompt included.
        leaders: for each sequence, the first sequence that has the same prompt.
        """
        sharing = {leader for sequence, leader in enumerate(leaders) if sequence != leader}
        if not sharing:
            return None
        sizes: list[int] = []
        continued: list[int | None] = []
        last_segments: list[int] = []
        tokens: list[Tensor] = []
        segment_of_prompt: dict[int, int] = {}

        def add(length: int, prompt: int | None, first: int) -> None:
            sizes.append(length)
            continued.append(prompt)
            tokens.append(torch.arange(first, first + length))

        starts = [0, *accumulate(lengths)]
        for sequence, (prompt, length, leader) in enumerate(zip(prompts, lengths, leaders, strict=True)):
            if leader not in sharing:
                add(length, None, starts[sequence])
                last_segments.append(len(sizes) - 1)
                continue
            if sequence == leader:
                segment_of_prompt[leader] = len(sizes)
                add(prompt, None, starts[sequence])
            if length > prompt:
                add(length - prompt, segment_of_prompt[leader], starts[sequence] + prompt)
            last_segments.append(len(sizes) - 1 if length > prompt else segment_of_prompt[leader])
        kept = torch.cat(tokens)
        places = torch.empty(starts[-1], dtype=torch.int64)
        places[kept] = torch.arange(len(kept))
        for sequence, leader in enumerate(leaders):
            prompt = prompts[sequence]
            places[starts[sequence] : starts[sequence] + prompt] = places[starts[leader] : starts[leader] + prompt]
        return cls(tuple(sizes), tuple(continued), tuple(last_segments), tuple(leaders), kept, places)

    @property
    def contained(self) -> Tensor:
        """(n, segments) float32: 1 if the sequence contains the segment, and 0 otherwise."""
        table = torch.zeros(len(self.last_segments), len(self.lengths))
        for sequence, segment in enumerate(self.last_segments):
            table[sequence, segment] = 1
            if (prompt := self.prompts[segment]) is not None:
                table[sequence, prompt] = 1
        return table

    @property
    def continues(self) -> bool:
        """Whether any segment continues a prompt.

        The result is False if every response to a shared prompt has one token, which no token after it needs as an input.
        """
        return any(prompt is not None for prompt in self.prompts)

    def padded(self, missing: int) -> SharedPrompts:
        """Return the same segments, and one more with `missing` tokens, which belongs to no sequence."""
        return replace(self, lengths=(*self.lengths, missing), prompts=(*self.prompts, None))

    def repeats_prompt(self, sequence: int) -> bool:
        """Whether an earlier sequence has the same prompt."""
        return self.leaders[sequence] != sequence


@dataclass(frozen=True, eq=False)
class CutRow:
    """Runs of tokens that are copied from a packed row, one after another, into a row of their own."""

    places: Tensor
    """(T',) int64: position in the original row of each of the T' copied tokens."""
    lengths: tuple[int, ...]
    """Number of tokens of each run."""

    @classmethod
    def of(cls, runs: Sequence[Tensor], device: torch.device) -> CutRow:
        """runs: (length,) int64 each, the positions of the tokens of a run."""
        return cls(torch.cat(list(runs)).to(device), tuple(len(run) for run in runs))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def boundaries(self) -> Tensor:
        """(runs + 1,) int32 cumulative lengths."""
        return torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32).to(self.places.device)

    @cached_property
    def int64_boundaries(self) -> Tensor:
        """The same in int64, for the kernels of linear attention (`kernels.py`)."""
        return self.boundaries.long()

    @cached_property
    def split(self) -> Split:
        return Split.of(self.lengths, self.places.device)

    def cut(self, *tensors: Tensor) -> list[Tensor]:
        """Copy the tokens of the runs. tensors: (1, T, …). Returns (1, T', …) each."""
        return [x.index_select(1, self.places) for x in tensors]


@dataclass(frozen=True, eq=False)
class PromptLayout:
    """The places at which the mixers of a forward pass find the tokens of a row in which segments continue a prompt.

    W: width of the convolution.
    """

    beginnings: CutRow
    """The segments that begin a sequence."""
    continuations: CutRow
    """The segments that continue a prompt."""
    prompts: Tensor
    """(continuations,) int64: the prompt of each continuation, as an index into `beginnings`."""
    back: Tensor
    """(T,) int64: position of each token of the row in `beginnings`, followed by `continuations`."""
    windows: CutRow
    """Each segment after the last W - 1 tokens of its prompt."""
    of_windows: Tensor
    """(T,) int64: position of each token of the row in `windows`."""
    histories: CutRow
    """Each segment after its whole prompt."""
    attended: tuple[tuple[Tensor, Tensor], ...]
    """Batches of continuations of one prompt that have similar lengths: positions of the prompt's P tokens in the row (P,),
    and of the tokens of b right-padded continuations (b, l). Entries after a continuation's end are arbitrary."""
    back_from_attended: Tensor
    """(T,) int64: position of each token of the row in `beginnings`, followed by the flattened batches of `attended`."""

    @classmethod
    def of(cls, shared: SharedPrompts, width: int, device: torch.device) -> PromptLayout:
        starts = [0, *accumulate(shared.lengths)]
        runs = [torch.arange(start, start + length) for start, length in zip(starts, shared.lengths, strict=False)]
        begins = [segment for segment, prompt in enumerate(shared.prompts) if prompt is None]
        continues = [(segment, prompt) for segment, prompt in enumerate(shared.prompts) if prompt is not None]
        # A segment without a prompt follows no tokens.
        before = [
            runs[segment][:0] if prompt is None else runs[prompt] for segment, prompt in enumerate(shared.prompts)
        ]
        last = [run[max(0, len(run) - width + 1) :] for run in before]
        first_in_windows = [0, *accumulate(len(run) + length for run, length in zip(last, shared.lengths, strict=True))]
        in_windows = [
            torch.arange(length) + first + len(run)
            for first, run, length in zip(first_in_windows, last, shared.lengths, strict=False)
        ]
        numbers = {segment: number for number, segment in enumerate(begins)}
        order = torch.cat([runs[segment] for segment in (*begins, *(segment for segment, _ in continues))])
        attended, positions = _attended(runs, continues, starts[-1])
        in_attended = torch.empty(starts[-1], dtype=torch.int64)
        begun = torch.cat([runs[segment] for segment in begins])
        in_attended[begun] = torch.arange(len(begun))
        for segment, _ in continues:
            in_attended[runs[segment]] = positions[segment] + len(begun)
        return cls(
            beginnings=CutRow.of([runs[segment] for segment in begins], device),
            continuations=CutRow.of([runs[segment] for segment, _ in continues], device),
            prompts=torch.tensor([numbers[prompt] for _, prompt in continues]).to(device),
            back=order.argsort().to(device),
            windows=CutRow.of([torch.cat(pair) for pair in zip(last, runs, strict=True)], device),
            of_windows=torch.cat(in_windows).to(device),
            histories=CutRow.of([torch.cat(pair) for pair in zip(before, runs, strict=True)], device),
            attended=tuple((prompt.to(device), places.to(device)) for prompt, places in attended),
            back_from_attended=in_attended.to(device),
        )


def _attended(
    runs: Sequence[Tensor], continues: Sequence[tuple[int, int]], tokens: int
) -> tuple[list[tuple[Tensor, Tensor]], dict[int, Tensor]]:
    """Return the batches of `PromptLayout.attended`, and the positions of each continuation's tokens in the flattened batches.

    runs: the positions of each segment's tokens in the row. continues: each continuation and its prompt. tokens: number of
    tokens of the row.
    """
    of_prompt: dict[int, list[int]] = {}
    for segment, prompt in continues:
        of_prompt.setdefault(prompt, []).append(segment)
    batches: list[tuple[Tensor, Tensor]] = []
    positions: dict[int, Tensor] = {}
    taken = 0
    for prompt, segments in of_prompt.items():
        for members in similar([len(runs[segment]) for segment in segments]):
            longest = len(runs[segments[members[0]]])
            for row, member in enumerate(members):
                segment = segments[member]
                positions[segment] = taken + row * longest + torch.arange(len(runs[segment]))
            starts = torch.stack([runs[segments[member]][0] for member in members])
            places = (starts.unsqueeze(1) + torch.arange(longest)).clamp(max=tokens - 1)
            batches.append((runs[prompt], places))
            taken += places.numel()
    return batches, positions
