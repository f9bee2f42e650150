"""Records the candidates of every token of the Torch engine's running sequences, by slot.

A candidate is a token that truncated sampling (top-p, top-k, min-p) could have drawn at a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.rollout.rollout_engine import GeneratedTokens

_NO_IDS = np.empty(0, np.int32)


class CandidateLog:
    """The candidates of the tokens in each slot. Only slots whose sequences have candidates have a record.

    slots: number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._ids: list[list[NDArray[np.int32]] | None] = [None] * slots  # an array for each token

    def begin(self, slot: int, kept: GeneratedTokens, *, truncates: bool) -> None:
        """Start the record of the candidates of a sequence's tokens. slot: the slot of the sequence.

        kept: the tokens that the sequence already has. truncates: whether its further tokens come from truncated
        sampling, and so have candidates. If neither the kept nor the further tokens have candidates, the slot gets no
        record.
        """
        candidates = kept.candidates
        if candidates is None:
            self._ids[slot] = [_NO_IDS] * len(kept) if truncates else None
        else:
            ends = np.cumsum(candidates.counts, dtype=np.int64)
            self._ids[slot] = np.split(candidates.ids, ends)[:-1]

    def append(self, kept: Tensor | None, truncating: Sequence[bool]) -> None:
        """Add the candidates of one more token for each running sequence.

        kept: (sequences, vocabulary) bool, true for each token that could have been drawn; None: all tokens, in every
        row. truncating: for each row, whether its sequence is sampled with truncation.
        """
        drawn: dict[int, NDArray[np.int32]] = {}
        if kept is not None:
            rows = [row for row, truncates in enumerate(truncating) if truncates]
            table = kept.cpu()[rows].numpy()
            table &= ~table.all(axis=1, keepdims=True)  # nothing was dropped: an empty set means the whole vocabulary
            of_rows, ids = table.nonzero()
            ends = np.cumsum(np.bincount(of_rows, minlength=len(rows)))[:-1]
            drawn = dict(zip(rows, np.split(ids.astype(np.int32), ends), strict=True)) if rows else {}
        for row, record in enumerate(self._ids[: len(truncating)]):
            if record is not None:
                record.append(drawn.get(row, _NO_IDS).copy())  # a view would keep the whole step in memory

    def candidates(self, slot: int, start: int, end: int) -> Candidates | None:
        """Return the candidates of tokens `start` to `end` (exclusive) in a slot; None if the slot has no record."""
        record = self._ids[slot]
        if record is None:
            return None
        part = record[start:end]
        return Candidates(np.array([len(ids) for ids in part], np.int32), np.concatenate([_NO_IDS, *part]))

    def move(self, source: int, target: int) -> None:
        """Move the record of a slot to another slot."""
        self._ids[target], self._ids[source] = self._ids[source], None
