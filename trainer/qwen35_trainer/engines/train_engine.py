"""The contract between a train worker and the engine that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qwen35_trainer.engines.train_batch import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of one optimizer step, over all ranks."""

    loss: float
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Number of tokens in the loss."""
    means: Mapping[str, float]
    """Per-token means of the objective's metrics."""


class TrainEngine(Protocol):
    """One rank of the train pool. All ranks get the same calls in the same order."""

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        """Do `batch.updates` optimizer steps. batch: this rank's share (`batch_division`).

        Losses are divided by counts over all ranks, so that the steps do not depend on how the ranks divide the batch.
        A step whose gradient is not finite is skipped; its metrics hold the gradient's norm. Raises an exception after
        several skipped steps in a row.
        """
        ...

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        """Compute the mean negative log-likelihood of the batch's trainable tokens, in nats, without training."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a publication: every parameter once, unsharded, under the name by which replicas load it.

        Tensors are in `model.precision`, except those that published checkpoints keep in float32. With adapters, only the
        adapters are published (`weights/adapters.py` has their names): replicas already have the base model.

        Collective: all ranks exhaust the iterator before the next call. Rank 0 gets the tensors, on the host, one at a time;
        the other ranks get none, and hold at most one in memory. A tensor may share memory with the live weights: copy it
        before the next step. `TrainWorker.publication` copies them into Ray's object store (`weights/published.py`).
        """
        ...

    def save(self, folder: Path) -> None:
        """Copy this rank's share of the trained weights, optimizer and random state, and start to write it into `folder`.

        Collective. Training may continue immediately, and does not change what is written. `saved` reports when the
        writing is done. If the previous save is still being written, waits for it first, and raises its error, if any.
        """
        ...

    def saved(self, *, wait: bool = False) -> bool:
        """Whether all ranks have written the last `save`. With `wait`, wait until they have, on any thread.

        Raises the error of writing.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Read a checkpoint that `save` wrote, on the same or another number of ranks. Collective."""
        ...
