"""The tokens that replicas have reported: packed on their way to the driver, and in a growing buffer for each sequence there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens

_MIN_GROWTH_TOKENS = 64
_GROWTH = 1.25
"""Each time the buffer is full its capacity grows by this factor, so that copying costs a constant time per token."""


@dataclass(frozen=True)
class PackedTokens:
    """T tokens of a sequence, in the form in which they are copied to its buffer."""

    table: NDArray[np.int32]
    """(3, T): ids, the bits of the log-probs, versions."""
    candidates: Candidates | None

    def __len__(self) -> int:
        return len(self.table[0])


class TokenBlock(Mapping[SequenceId, GeneratedTokens]):
    """New tokens of any number of sequences in one array, because pickling an array costs as much as a hundred tokens."""

    def __init__(self, parts: Mapping[SequenceId, Sequence[GeneratedTokens]] = {}) -> None:
        """parts: the tokens of each sequence, in pieces."""
        self._names = tuple(parts)
        self._ends = np.cumsum([sum(map(len, pieces)) for pieces in parts.values()], dtype=np.int64)
        all_tokens = GeneratedTokens.join(piece for pieces in parts.values() for piece in pieces)
        self._data = _packed(all_tokens).table
        self._candidates = all_tokens.candidates

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[SequenceId]:
        return iter(self._names)

    def __getitem__(self, name: SequenceId) -> GeneratedTokens:
        if name not in self._names:
            raise KeyError(name)
        index = self._names.index(name)
        return _unpacked(self._part(int(self._ends[index - 1]) if index else 0, int(self._ends[index])))

    def packed(self) -> Iterator[tuple[SequenceId, PackedTokens]]:
        """Yield each sequence with its tokens as `TokenBuffer.append` takes them."""
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
    """A growing copy of a sequence's tokens: 12 bytes per token, and at most a quarter more.

    Candidates are kept as they come, in pieces: a long sequence reports tokens when they are a share of it (`PROGRESS_SHARE`), so
    their number grows with the logarithm of its length.
    """

    __slots__ = ("_candidates", "_data", "_length")

    def __init__(self, tokens: GeneratedTokens = NO_TOKENS) -> None:
        self._data = np.empty((3, 0), np.int32)  # ids, the bits of the log-probs, versions
        self._length = 0
        self._candidates: list[
            tuple[Candidates | None, int]
        ] = []  # and their number of tokens; empty without truncation
        self.append(_packed(tokens))

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: PackedTokens) -> None:
        """Copy tokens to the end. Their arrays, which may be parts of large ones, are not kept."""
        self._append_candidates(tokens)
        end = self._length + len(tokens)
        if end > self._data.shape[1]:
            capacity = max(end, int(self._length * _GROWTH), self._length + _MIN_GROWTH_TOKENS)
            grown = np.empty((3, capacity), np.int32)
            grown[:, : self._length] = self._data[:, : self._length]
            self._data = grown
        self._data[:, self._length : end] = tokens.table
        self._length = end

    def _append_candidates(self, tokens: PackedTokens) -> None:
        new = tokens.candidates
        if new is not None and not self._candidates:
            self._candidates = [(None, self._length)]
        if self._candidates:
            copied = None if new is None else Candidates(new.counts.copy(), new.ids.copy())
            self._candidates.append((copied, len(tokens)))

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens. Raises ValueError when there are fewer."""
        if length > self._length:
            raise ValueError(f"{length} tokens are to be kept, and there are {self._length}")
        self._length = length
        if self._candidates:
            candidates = self._joined()
            self._candidates = [(None if candidates is None else candidates[:length], length)]

    def tokens(self) -> GeneratedTokens:
        """Return a copy of the tokens."""
        return _unpacked(PackedTokens(self._data[:, : self._length].copy(), self._joined()))

    def _joined(self) -> Candidates | None:
        return Candidates.join(*zip(*self._candidates, strict=True)) if self._candidates else None


def _packed(tokens: GeneratedTokens) -> PackedTokens:
    log_probs = np.asarray(tokens.log_probs, np.float32).view(np.int32)
    return PackedTokens(np.stack([tokens.ids, log_probs, tokens.versions]), tokens.candidates)


def _unpacked(tokens: PackedTokens) -> GeneratedTokens:
    ids, log_probs, versions = tokens.table
    return GeneratedTokens(ids, log_probs.view(np.float32), versions, tokens.candidates)
