"""The protocol of a training engine, which a train worker runs. `create_engine` builds the engine that the manifest names.

What engines have in common is in `updating_engine`; an engine adds how the model is divided over ranks.
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
    """Per-token means of the objective's metrics."""


class TrainEngine(Protocol):
    """The engine of one rank of the train pool. Every rank must get the same calls in the same order.

    Every rank returns the same metrics and the same loss, so the driver reads those of rank 0. In a pool with pipeline stages
    only the last stage computes them; the engine brings them to the other ranks.
    """

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        """Do `batch.updates` optimizer steps. batch: this rank's share (`batch_division`).

        Losses are divided by counts over all ranks, so that the steps do not depend on how the ranks divide the batch.
        A step whose gradient is not finite is skipped; its metrics contain the norm of that gradient. After several skipped
        steps in a row the engine raises an exception.
        """
        ...

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        """Compute the mean negative log-likelihood of the batch's trainable tokens, in nats, without training."""
        ...

    def log_probs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Compute the log-prob of each trainable response token at temperature 1, and 0 for other response tokens.

        Collective. Every rank returns the (R,) values of all samples, one after another. batch: this rank's share.
        """
        ...

    def shards(self) -> Sequence[WeightShard]:
        """Return this rank's part of each tensor of a publication, under the name by which replicas load the tensor.

        All ranks return the same tensors in the same order, and each value of a tensor is in the shard of exactly one rank.
        Tensors are published in `model.precision`, or in bfloat16 if the replicas compute in bfloat16. Tensors that are float32
        in the published checkpoints of the family stay float32. With adapters, only the adapters are published, because replicas
        already have the base model (`weights/adapters.py` has their names).

        Collective. The shards may share memory with the live weights, as all of FSDP's do: a transport (`weights/transports`)
        copies them before the next step. An engine that holds weights in another arrangement copies what this rank publishes.
        """
        ...

    def save(self, folder: Path) -> None:
        """Copy this rank's share of the trained weights, optimizer and random state, and start to write it into `folder`.

        Collective. Training may continue when the call returns, and does not change what is written. `saved` reports when the
        writing is done, which may be immediately. If the previous save is still being written, this call first waits for its end, and raises its error
        if it failed.
        """
        ...

    def saved(self, *, wait: bool = False) -> bool:
        """Return whether all ranks have written the last `save`. If writing failed, the error is raised here.

        wait: whether to return only when all ranks have written. Any thread may wait.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Read a checkpoint that `save` wrote, on the same or another number of ranks. Collective."""
        ...

    def sleep(self) -> MemoryChange:
        """Move everything that this rank holds on its device to host memory, so that replicas can use the device.

        Parameters, gradients, optimizer state and the reference model move. No other method may be called before `wake`.
        Returns the bytes of tensors on the device, before and after.
        """
        ...

    def wake(self) -> None:
        """Move everything back to the device. Without effect unless the engine sleeps."""
        ...
