"""The share of a batch that a rank computes, and sums over all shares."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor


class BatchRanks(ABC):
    """The number of a rank, and the share of a batch that the rank computes. Several ranks may compute the
    same share together.
    """

    rank: int
    data_shares: int
    """Number of shares into which a batch is divided."""

    @property
    @abstractmethod
    def data_share(self) -> int:
        """Index of the share of a batch that this rank computes."""

    @property
    @abstractmethod
    def adds_to_sums(self) -> bool:
        """Whether this rank adds its values to sums over ranks. Of the ranks that compute a share, exactly one does."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor in host memory over all shares of a batch, entry by entry.

        Collective. Every rank gets the sums.
        """
        total = values.clone() if self.adds_to_sums else torch.zeros_like(values)
        dist.all_reduce(total)
        return total

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum of each entry of a tensor over all shares of a batch.

        Collective. Every rank gets the maxima.
        """
        largest = values.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest
