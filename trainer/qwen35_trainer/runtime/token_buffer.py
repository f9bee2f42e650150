"""The tokens of one sequence that its replicas have reported, in memory that grows with them."""

from __future__ import annotations

import numpy as np

from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens

_MIN_GROWTH_TOKENS = 64
_GROWTH = 1.25
"""Each time the buffer is full its capacity grows by this factor, so that copying costs a constant time per token."""


class TokenBuffer:
    """A growing copy of a sequence's tokens: 12 bytes per token, and at most a quarter more."""

    __slots__ = ("_data", "_length")

    def __init__(self, tokens: GeneratedTokens = NO_TOKENS) -> None:
        self._data = np.empty((3, 0), np.int32)  # ids, the bits of the log-probs, versions
        self._length = 0
        self.append(tokens)

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: GeneratedTokens) -> None:
        """Copy tokens to the end: the arrays of a report, which may share one block of memory, are not kept."""
        end = self._length + len(tokens)
        if end > self._data.shape[1]:
            capacity = max(end, int(self._length * _GROWTH), self._length + _MIN_GROWTH_TOKENS)
            grown = np.empty((3, capacity), np.int32)
            grown[:, : self._length] = self._data[:, : self._length]
            self._data = grown
        new = slice(self._length, end)
        self._data[0, new] = tokens.ids
        self._data[1, new] = tokens.log_probs.view(np.int32)
        self._data[2, new] = tokens.versions
        self._length = end

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens. Raises ValueError when there are fewer."""
        if length > self._length:
            raise ValueError(f"{length} tokens are to be kept, and there are {self._length}")
        self._length = length

    def tokens(self) -> GeneratedTokens:
        """Return a copy of the tokens."""
        ids, log_probs, versions = self._data[:, : self._length].copy()
        return GeneratedTokens(ids, log_probs.view(np.float32), versions)
