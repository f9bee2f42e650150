"""The protocol of a training engine, which a train worker runs. `create_engine` builds the engine that is configured.

`updating_engine` has the parts that all engines share. An engine adds the division of the model over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.engines.train_batch import TrainBatch

if TYPE_CHECKING:
    from qwen35_trainer.weights.memory_change import MemoryChange
    from qwen35_trainer.weights.staging import WeightShard


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of one optimizer step, over all ranks."""

    loss: float
    gradient_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    tokens: int
    """Number of tokens in the loss."""
    means: Mapping[str, float]
    """Means of the objective's metrics, per trained token."""


class TrainEngine(Protocol):
    """The engine of one rank of the train pool. Every rank must get the same calls in the same order.

    Every rank returns the same metrics and the same loss, so the driver uses the values of rank 0. With pipeline stages,
    only the last stage computes them, and the engine sends them to the other ranks.
    """

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        """Make `batch.updates` optimizer steps, and return the metrics of each.

        batch: this rank's share (`batch_division`). learning_rates: one for each step. Losses are divided by counts
        over all ranks, so that the steps do not depend on how the ranks divide the batch.

        A step is skipped if it has no trained token, or if its gradient is not finite. In the second case, its metrics
        contain the norm of the gradient. Raises NotFinite or NotFiniteInSFT after `MAX_SKIPPED_UPDATES` consecutive
        gradients that are not finite, and ValueError if `batch` is not this rank's share.
        """
        ...

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        """Return the mean negative log-likelihood of the whole batch's trainable tokens, in nats.
        Nothing trains. Collective.

        batch: this rank's share.
        """
        ...

    def log_probs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-prob at temperature 1 of each trainable response token, and 0 for other
        response tokens. Collective.

        batch: this rank's share. Every rank returns the values of all samples of the batch, concatenated: (R,), R the
        number of response tokens of all samples.
        """
        ...

    def shards(self) -> Sequence[WeightShard]:
        """Return this rank's part of each tensor of a publication, under the name by which replicas load
        the tensor. Collective.

        All ranks return the same tensors in the same order, and each value of a tensor is in the shard of exactly one
        rank. Tensors have the type that `published_precision` returns, except for those that `keeps_float32` selects,
        which are always float32. With adapters, only the adapters are published, because replicas already have the base
        model (`weights/adapters.py` has the names of adapters).

        The shards may share memory with the live weights, as all shards of FSDP do. A transport (`weights/transports`)
        therefore copies them before the next step. An engine that does not store weights as they are published copies
        what this rank publishes.
        """
        ...

    def save(self, folder: Path) -> None:
        """Copy this rank's part of the trained weights, optimizer state and random state, and begin to
        write it into `folder`.

        Collective. When the call returns, training may continue without changing what is written. `saved` reports when
        the writing is done, which may be immediately. If the previous save is still being written, this call first
        waits until it is complete. If the previous save failed, this call raises the error of the
        previous save.
        """
        ...

    def saved(self, *, wait: bool = False) -> bool:
        """Return whether all ranks have finished the writing that the last `save` began. Raises the error if it failed.

        wait: whether to wait until all ranks have finished. Any thread may wait.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Read a checkpoint that `save` wrote, on the same or another number of ranks (reshard). Collective."""
        ...

    def sleep(self) -> MemoryChange:
        """Move everything that this rank holds on its device to host memory (offload), so that replicas
        can use the device.

        Parameters, gradients, optimizer state and the reference model move. No other method may be called before
        `wake`. Returns the bytes of tensors on the device, before and after.
        """
        ...

    def wake(self) -> None:
        """Undo `sleep`: move the tensors from host memory back to the device. If the engine is not asleep, do nothing."""
        ...
