"""The logits that count in a softmax over a part of the vocabulary, and the removal of all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35_trainer.data.candidates import Candidates

REMOVED_LOGIT = -1e30
"""The value of a removed logit. The token's probability is then 0. Unlike -inf, the value times 0 is not NaN, so entropies and
gradients need no special case."""


@dataclass(frozen=True, eq=False)
class KeptLogits:
    """The logits that count in the softmax of each of R rows: those of the row's candidates, or all logits if it has
    none.
    """

    candidates: Candidates
    """The candidates of each row, on the host, so that a chunk of rows can be selected without waiting for the device."""
    device: torch.device
    """The device of the logits."""

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, rows: Tensor) -> KeptLogits:
        """Return the kept logits of n of the R rows. rows: (n,) int64, their indices."""
        return KeptLogits(self.candidates.take(rows.cpu().numpy()), self.device)

    def remove_others(self, logits: Tensor, part: slice) -> None:
        """Overwrite the logits that do not count by REMOVED_LOGIT.

        part: a range of the R rows. logits: (rows of `part`, V), in any precision that holds 1e30.
        """
        of_part = self.candidates[part]
        counts = torch.from_numpy(of_part.counts.copy()).to(self.device)
        ids = torch.from_numpy(of_part.ids.copy()).to(self.device, torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(counts), device=self.device), counts, output_size=len(ids))
        kept = logits[rows, ids]
        logits.masked_fill_((counts > 0).unsqueeze(1), REMOVED_LOGIT)
        logits[rows, ids] = kept
