"""The tokens that replicas have reported: packed on their way to the driver, and in a buffer for each sequence there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens

_EMPTY = np.empty((3, 0), np.int32)


class TokenBlock(Mapping[SequenceId, GeneratedTokens]):
    """New tokens of any number of sequences in one array, because each array in a pickle costs as much as a hundred more tokens."""

    def __init__(self, parts: Mapping[SequenceId, Sequence[GeneratedTokens]] = {}) -> None:
        """parts: the tokens of each sequence, in pieces."""
        self._names = tuple(parts)
        self._ends = np.cumsum([sum(map(len, pieces)) for pieces in parts.values()], dtype=np.int64)
        all_tokens = GeneratedTokens.join(piece for pieces in parts.values() for piece in pieces)
        self._data = _packed(all_tokens)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[SequenceId]:
        return iter(self._names)

    def __getitem__(self, name: SequenceId) -> GeneratedTokens:
        if name not in self._names:
            raise KeyError(name)
        index = self._names.index(name)
        start = int(self._ends[index - 1]) if index else 0
        return _unpacked(self._data[:, start : int(self._ends[index])])

    def packed(self) -> Iterator[tuple[SequenceId, NDArray[np.int32]]]:
        """Yield each sequence with its tokens as `TokenBuffer.append` takes them."""
        start = 0
        for name, end in zip(self._names, self._ends.tolist(), strict=True):
            yield name, self._data[:, start:end]
            start = end


class TokenBuffer:
    """The tokens of one sequence: 12 bytes per token, and about 150 bytes for each part that was appended.

    Parts are joined only when the tokens are read: growing one array would copy each token several times.
    """

    __slots__ = ("_length", "_parts")

    def __init__(self, tokens: GeneratedTokens = NO_TOKENS) -> None:
        self._parts: list[NDArray[np.int32]] = []  # each (3, T): ids, the bits of the log-probs, versions
        self._length = 0
        if len(tokens):
            self.append(_packed(tokens))

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Copy tokens, (3, T) as in `TokenBlock.packed`, to the end. The array, which may be part of a large one, is not kept."""
        self._parts.append(tokens.copy())
        self._length += tokens.shape[1]

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens. Raises ValueError when there are fewer."""
        if length > self._length:
            raise ValueError(f"{length} tokens are to be kept, and there are {self._length}")
        if length < self._length:
            self._parts = [self._joined()[:, :length].copy()]
            self._length = length

    def tokens(self) -> GeneratedTokens:
        """Return the tokens, which no later call changes."""
        return _unpacked(self._joined())

    def _joined(self) -> NDArray[np.int32]:
        if len(self._parts) != 1:
            self._parts = [np.concatenate([_EMPTY, *self._parts], axis=1)]
        return self._parts[0]


def _packed(tokens: GeneratedTokens) -> NDArray[np.int32]:
    """Return tokens as one array, (3, T): ids, the bits of the log-probs, versions."""
    return np.stack([tokens.ids, np.asarray(tokens.log_probs, np.float32).view(np.int32), tokens.versions])


def _unpacked(data: NDArray[np.int32]) -> GeneratedTokens:
    return GeneratedTokens(data[0], data[1].view(np.float32), data[2])
