"""The division of a batch among data-parallel ranks.

    batch ─► update 0: samples ─► share 0, share 1, …         a share of the batch: those of all its updates
         ─► update 1: samples ─► share 0, share 1, …          every rank plans all shares, from the lengths of all samples,
                                     └─► micro-batches        and has the tokens of its own

The driver sends each share to the ranks that compute it, and these ranks cut it into micro-batches. Both follow from the lengths
of all samples and the same settings, so nobody has to send a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.engines.micro_batch_plan import MicroBatchPlan, divide, plan
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec


@dataclass(frozen=True)
class BatchDivision:
    """The settings that decide which samples are computed together, and where."""

    shares: int
    """Number of groups of ranks with their own samples."""
    sequences: int = 1
    """Samples of a micro-batch."""
    max_tokens: int | None = None
    """Maximum number of tokens of a micro-batch, in place of `sequences`."""
    packed: bool = False
    """Padding does not count as tokens."""
    whole_masks: bool = False
    """Ranks get the masks of all samples, for an advantage function of the user."""

    @classmethod
    def of(cls, spec: TrainingSpec, shares: int) -> BatchDivision:
        batch = spec.train.batch
        return cls(
            shares,
            batch.microBatchSequences,
            batch.maxTokensPerDevice * spec.train.parallelism.context if batch.dynamicMicroBatches else None,
            batch.removePadding,
            spec.mode != "SFT" and spec.algorithm.advantageFunction is not None,
        )

    def micro_batches(self, batch: TrainBatch, part: NDArray[np.int64]) -> MicroBatchPlan:
        """Return the micro-batches of an update, by share. part: the samples of the update."""
        lengths = batch.lengths[part]
        planned = plan(lengths, self.shares, sequences=self.sequences, max_tokens=self.max_tokens, packed=self.packed)
        return [[part[samples] for samples in share] for share in planned]

    def samples(self, batch: TrainBatch) -> list[NDArray[np.int64]]:
        """Return the samples of each share of a batch, ascending."""
        by_tokens = self.max_tokens is not None and self.packed
        divided = [
            [part[samples] for samples in divide(batch.lengths[part], self.shares, by_tokens=by_tokens)]
            for part in batch.parts
        ]
        return [np.sort(np.concatenate(of_updates)) for of_updates in zip(*divided, strict=True)]

    def share(self, batch: TrainBatch, number: int) -> TrainBatch:
        """Return share `number` of a whole batch: `batch` itself if there is only one."""
        if self.shares == 1:
            return batch
        return batch.share(self.samples(batch)[number], whole_masks=self.whole_masks)

    def shares_of(self, batch: TrainBatch) -> Iterator[TrainBatch]:
        """Yield all shares of a whole batch. Each is a copy of its tokens, so drop one before the next."""
        if self.shares == 1:
            yield batch
            return
        for samples in self.samples(batch):
            yield batch.share(samples, whole_masks=self.whole_masks)


ONE_SHARE = BatchDivision(shares=1)
"""All ranks compute the same samples."""
