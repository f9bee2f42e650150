"""The tokens that truncated sampling could have drawn at each position of a response.

Top-p, top-k and min-p draw from a part of the vocabulary, and a token's log-probability is that of the distribution over this
part. The trainer computes its log-probabilities over the same part, so that the ratio of an unchanged policy is 1: "Keep
Sampling Mask" of DeepSeek-V3.2, arXiv:2512.02556 section 3.1. `KeptLogits` removes all other tokens from the trainer's logits.

    counts     3         1     2          one per token
    ids        4 7 9  │  5  │  2 8  │ …   the candidates of one token after another
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Candidates:
    """The candidates of some tokens.

    The candidates of a token are all tokens that sampling could have drawn in its place. A count of 0 means that the
    candidates are the whole vocabulary.
    """

    counts: NDArray[np.int32]
    """(tokens,) number of candidates of each token."""
    ids: NDArray[np.int32]
    """(sum of the counts,) token ids of the candidates, for one token after another."""

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, part: slice) -> Candidates:
        """Return the candidates of the tokens in a slice, whose step is ignored.

        The result shares the memory of this object.
        """
        start, end, _ = part.indices(len(self))
        counts = self.counts[start:end]
        first = int(self.starts[start]) if start < len(self) else len(self.ids)
        return Candidates(counts, self.ids[first : first + int(counts.sum())])

    def copy(self) -> Candidates:
        """Return a copy with its own arrays.

        If the arrays of this object are views of larger arrays, the copy does not keep the larger arrays in memory.
        """
        return Candidates(self.counts.copy(), self.ids.copy())

    @classmethod
    def whole_vocabulary(cls, tokens: int) -> Candidates:
        """Return the candidates of `tokens` tokens that were drawn without truncation."""
        return cls(np.zeros(tokens, np.int32), np.empty(0, np.int32))

    @classmethod
    def join(cls, parts: Iterable[Candidates | None], lengths: Iterable[int]) -> Candidates | None:
        """Concatenate the candidates of consecutive parts of a response. Returns None if no part has candidates.

        parts: candidates of each part; None for a part that was drawn without truncation. lengths: number of tokens of
        each part.
        """
        all_parts = list(parts)
        if all(part is None for part in all_parts):
            return None
        held = [
            cls.whole_vocabulary(length) if part is None else part
            for part, length in zip(all_parts, lengths, strict=True)
        ]
        return cls(np.concatenate([part.counts for part in held]), np.concatenate([part.ids for part in held]))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """(tokens,) position in `ids` of each token's first candidate."""
        starts: NDArray[np.int64] = np.cumsum(self.counts, dtype=np.int64) - self.counts
        return starts

    def take(self, tokens: NDArray[np.int64]) -> Candidates:
        """Return a copy of the candidates of some tokens. tokens: positions of these tokens, in the wanted order."""
        counts = self.counts[tokens]
        first = np.cumsum(counts, dtype=np.int64) - counts
        cells = np.arange(int(counts.sum())) + np.repeat(self.starts[tokens] - first, counts)
        return Candidates(counts, self.ids[cells])
