"""The tokens that replicas report: packed on their way to the driver, and in one buffer per sequence in the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens

_EMPTY = np.empty((3, 0), np.int32)


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """T tokens of a sequence, packed in the form in which the sequence's buffer stores them."""

    table: NDArray[np.int32]
    """(3, T) rows: token ids, the bits of the float32 log-probs, and versions of the weights."""
    candidates: Candidates | None

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def first(self, count: int) -> PackedTokens:
        """Return the first `count` tokens. The result shares the memory of this object."""
        return PackedTokens(self.table[:, :count], None if self.candidates is None else self.candidates[:count])

    def copy(self) -> PackedTokens:
        """Return a copy that owns its arrays, so that it keeps no larger array in memory."""
        return PackedTokens(self.table.copy(), None if self.candidates is None else self.candidates.copy())


class TokenBlock(Mapping[SequenceId, GeneratedTokens]):
    """New tokens of any number of sequences in one array.

    One array is cheaper than many, because each array in a pickle costs as much as a hundred tokens.
    """

    def __init__(self, parts: Mapping[SequenceId, Sequence[GeneratedTokens]] = {}) -> None:
        """Join tokens into one block. parts: the new tokens of each sequence, in one or several pieces."""
        self._names = tuple(parts)
        self._ends = np.cumsum([sum(map(len, pieces)) for pieces in parts.values()], dtype=np.int64)
        all_tokens = GeneratedTokens.join(piece for pieces in parts.values() for piece in pieces)
        self._data = _packed(all_tokens).table
        self._candidates = all_tokens.candidates

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[SequenceId]:
        return iter(self._names)

    @property
    def token_count(self) -> int:
        """The number of tokens of all sequences together."""
        return int(self._data.shape[1])

    def __getitem__(self, name: SequenceId) -> GeneratedTokens:
        if name not in self._names:
            raise KeyError(name)
        index = self._names.index(name)
        return _unpacked(self._part(int(self._ends[index - 1]) if index else 0, int(self._ends[index])))

    def packed(self) -> Iterator[tuple[SequenceId, PackedTokens]]:
        """Yield each sequence with its packed tokens, which `TokenBuffer.append` accepts."""
        start = 0
        for name, end in zip(self._names, self._ends.tolist(), strict=True):
            yield name, self._part(start, end)
            start = end

    def _part(self, start: int, end: int) -> PackedTokens:
        candidates = None if self._candidates is None else self._candidates[start:end]
        if candidates is not None and not candidates.counts.any():
            candidates = None  # only other sequences of the block are sampled with truncation
        return PackedTokens(self._data[:, start:end], candidates)


class TokenBuffer:
    """The tokens of one sequence, to which parts can be appended.

    It takes 12 bytes per token, plus its candidates, and about 300 bytes per part. Parts are joined only when the
    tokens are read, because growing one array would copy each token several times. There are few parts, because a long
    sequence reports new tokens only when they are a certain share of it (`rollout_worker.PROGRESS_SHARE`).
    """

    __slots__ = ("_length", "_parts")

    def __init__(self, tokens: GeneratedTokens = NO_TOKENS) -> None:
        self._parts: list[PackedTokens] = []
        self._length = 0
        if len(tokens):
            self.append(_packed(tokens))

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: PackedTokens) -> None:
        """Append a copy of tokens. The arrays of `tokens`, which may be parts of larger arrays, are not kept."""
        self._parts.append(tokens.copy())
        self._length += tokens.table.shape[1]

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens. Raises ValueError if the buffer has fewer tokens."""
        if length > self._length:
            raise ValueError(f"{length} tokens are to be kept, and there are {self._length}")
        if length < self._length:
            self._parts = [self._joined().first(length).copy()]
            self._length = length

    def tokens(self) -> GeneratedTokens:
        """Return all tokens. Later calls do not change the result."""
        return _unpacked(self._joined())

    def _joined(self) -> PackedTokens:
        if len(self._parts) != 1:
            table = np.concatenate([_EMPTY, *(part.table for part in self._parts)], axis=1)
            candidates = Candidates.join([part.candidates for part in self._parts], map(len, self._parts))
            self._parts = [PackedTokens(table, candidates)]
        return self._parts[0]


def _packed(tokens: GeneratedTokens) -> PackedTokens:
    log_probs = np.asarray(tokens.log_probs, np.float32).view(np.int32)
    return PackedTokens(np.stack([tokens.ids, log_probs, tokens.versions]), tokens.candidates)


def _unpacked(tokens: PackedTokens) -> GeneratedTokens:
    ids, log_probs, versions = tokens.table
    return GeneratedTokens(ids, log_probs.view(np.float32), versions, tokens.candidates)
