"""One number for each response token of a rank's share of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.engines.fsdp.micro_batch import Offsets
from qwen35_trainer.engines.train_batch import TrainBatch


@dataclass(frozen=True)
class TokenTable:
    """A number per response token of the held samples, packed like `TrainBatch.responses`, on the host.

    It takes 4 bytes per token of the share. A table (N, T) of the batch would take 4·N·T on every rank.
    """

    values: Tensor
    """(R,) float32."""
    starts: NDArray[np.int64]
    """(N,) position of each held sample's first token."""
    lengths: NDArray[np.int64]
    """(N,) response tokens of each sample."""

    @classmethod
    def zeros(cls, batch: TrainBatch, offsets: Offsets) -> TokenTable:
        return cls(torch.zeros(batch.responses.size), offsets.responses, batch.response_lengths)

    def fill(self, samples: NDArray[np.int64], rows: Tensor) -> None:
        """Set the values of `samples` from rows (n, T), which may be on any device and padded on the right."""
        source, target = rows.float().cpu().numpy(), self.values.numpy()
        for row, sample in enumerate(samples):
            start, length = self.starts[sample], self.lengths[sample]
            target[start : start + length] = source[row, :length]

    def rows(self, samples: NDArray[np.int64], like: Tensor) -> Tensor:
        """Return the values of `samples` as rows, 0 on padding, with the shape (n, T) and on the device of `like`."""
        source, target = self.values.numpy(), np.zeros(tuple(like.shape), dtype=np.float32)
        for row, sample in enumerate(samples):
            start, length = self.starts[sample], self.lengths[sample]
            target[row, :length] = source[start : start + length]
        return torch.from_numpy(target).to(like.device)
