"""Softmax over a part of the vocabulary: which logits of each row count, and the removal of all other logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35_trainer.data.candidates import Candidates

REMOVED_LOGIT = -1e30
"""The value that replaces a removed logit. The probability of the token is then 0. Unlike -inf, the value times 0 is
not NaN, so entropies and gradients need no special case."""


@dataclass(frozen=True, eq=False)
class KeptLogits:
    """The logits that count in the softmax of each of R rows: the logits of the row's candidates.

    A candidate is a token that the sampler could have drawn. In a row without candidates, all logits count.
    """

    candidates: Candidates
    """The candidates of each row, on the host, so that selecting a chunk of rows does not wait for the device."""
    device: torch.device
    """The device of the logits."""

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, rows: Tensor) -> KeptLogits:
        """Return the kept logits of some of the R rows. rows: int64 indices of these rows."""
        return KeptLogits(self.candidates.take(rows.cpu().numpy()), self.device)

    def remove_others(self, logits: Tensor, part: slice) -> None:
        """Replace the logits of tokens that are not candidates by REMOVED_LOGIT, in place.

        A row without candidates stays unchanged. part: a range of the R rows. logits: (rows of `part`, vocabulary), in any
        precision that can hold 1e30.
        """
        of_part = self.candidates[part]
        counts = torch.from_numpy(of_part.counts.copy()).to(self.device)
        ids = torch.from_numpy(of_part.ids.copy()).to(self.device, torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(counts), device=self.device), counts, output_size=len(ids))
        kept = logits[rows, ids]
        logits.masked_fill_((counts > 0).unsqueeze(1), REMOVED_LOGIT)
        logits[rows, ids] = kept
