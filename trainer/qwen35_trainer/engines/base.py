"""The contract between a train worker and the engine that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qwen35_trainer.engines.batch import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class UpdateMetrics:
    """What one optimizer step did, over all ranks."""

    loss: float
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Tokens in the loss."""
    means: Mapping[str, float]
    """Per-token means of the objective's metrics."""


class TrainEngine(Protocol):
    """One rank of the train pool. All ranks are called alike, in the same order."""

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        """Do `batch.updates` optimizer steps. Losses use global counts: any layout gives the same step."""
        ...

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        """Mean over the batch's trainable tokens, in nats, without training."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """All weights, whole, under the names that the rollout engine loads. Collective; valid on rank 0."""
        ...

    def save(self, folder: Path) -> None:
        """Write this rank's share of weights, optimizer and random state into `folder`. Collective."""
        ...

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, on this or another number of ranks. Collective."""
        ...
