"""The contract between a train worker and the engine that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        """Do `batch.updates` optimizer steps. Losses use global counts: any layout gives the same step.

        A step whose gradient is not finite is left out, and its metrics say so. Raises when several in a row are.
        """
        ...

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        """Mean over the batch's trainable tokens, in nats, without training."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What a publication carries: every parameter once, whole, under the name that the rollout engine loads it by.

        Tensors are in `model.precision`, except those that published checkpoints keep in float32. With adapters there are
        only these (`weights/adapters.py` has their names): a rollout engine builds the same base as this one did.

        Collective: all ranks go through the iterator to its end, before the next call. Rank 0 gets the tensors, on the host,
        one at a time; the others get none, and hold at most one. A tensor may share memory with the live weights: copy it
        before the next step.
        """
        ...

    def save(self, folder: Path) -> None:
        """Copy this rank's share of what trains, optimizer and random state, and start to write it into `folder`.

        Collective. Training may go on at once; what is written is the state at this call. `saved` tells when it is.
        Waits for the save before, and raises what writing that raised.
        """
        ...

    def saved(self, *, wait: bool = False) -> bool:
        """Whether the last `save` is written on all ranks; with `wait` only once it is. Raises what writing raised."""
        ...

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, on this or another number of ranks. Collective."""
        ...
