"""The division of a batch: which rank computes which samples, and the micro-batches of each rank.

    batch ─► update 0: samples ─► share 0, share 1, … ─► micro-batches of each share
         ─► update 1: samples ─► share 0, share 1, … ─► micro-batches of each share

The samples of each update are divided into shares. Share i of the batch consists of share i of every update. The driver
sends each share to the ranks that compute it, and these ranks cut it into micro-batches. Driver and ranks compute the
same division from the lengths of all samples and the same settings, so no plan is sent: `plan` and `divide` are pure. A
rank knows the lengths of all samples, but has only the tokens of its own share. If samples of a group share their prompt
(`train.batch.sharePrompts`), whole groups are divided instead of samples (`group_division.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.engines.bin_packing import balance, first_fit
from qwen35_trainer.engines.group_division import GroupParts
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec

type MicroBatchPlan = list[list[NDArray[np.int64]]]
"""For each rank, a list of micro-batches. A micro-batch is an array with the indices of its samples.

All ranks have the same number of micro-batches, of which some may be empty."""


@dataclass(frozen=True)
class BatchDivision:
    """The settings that decide which samples are computed together, and by which ranks."""

    shares: int
    """Number of shares into which a batch is divided. Each sample is in exactly one share."""
    sequences: int = 1
    """Maximum number of samples in a micro-batch. It has no effect if `max_tokens` is set."""
    max_tokens: int | None = None
    """Maximum number of tokens in a micro-batch. A longer sample has a micro-batch of its own.

    None: `sequences` is the limit."""
    packed: bool = False
    """Whether samples are packed without padding. If not, padding counts towards `max_tokens`."""
    stages: int = 1
    """Number of pipeline stages. Each stage computes all shares."""
    whole_masks: bool = False
    """Whether every share contains the loss masks of all samples of the batch. An advantage function of
    the user needs them."""
    share_prompts: bool = False
    """Whether samples of a group share their prompt within a micro-batch. It needs `packed`."""

    @classmethod
    def of(cls, spec: TrainingSpec, shares: int) -> BatchDivision:
        batch = spec.train.batch
        return cls(
            shares,
            batch.microBatchSequences,
            batch.maxTokensPerDevice * spec.train.parallelism.context if batch.dynamicMicroBatches else None,
            batch.removePadding,
            spec.train.parallelism.pipeline,
            spec.mode != "SFT" and spec.algorithm.advantageFunction is not None,
            batch.sharePrompts,
        )

    def share_of(self, rank: int, ranks: int) -> int:
        """Return the number of the share that `rank` computes. ranks: number of ranks of the train pool.

        Neighbouring ranks that share sequences (context parallelism) or matrix products (tensor parallelism)
        compute the same share. Ranks are numbered stage by stage: first all ranks of the first pipeline stage, then
        all ranks of the second stage. Every stage computes all shares.
        """
        return rank // (ranks // (self.shares * self.stages)) % self.shares

    def micro_batches(self, batch: TrainBatch, part: NDArray[np.int64]) -> MicroBatchPlan:
        """Return the micro-batches of one update, for each share. part: indices of the update's samples."""
        if (groups := self._groups(batch, part)) is not None:
            planned = _filled(groups.micro_batches(self.shares))
        else:
            planned = plan(
                batch.lengths[part],
                self.shares,
                sequences=self.sequences,
                max_tokens=self.max_tokens,
                packed=self.packed,
            )
        return [[part[samples] for samples in share] for share in planned]

    def samples(self, batch: TrainBatch) -> list[NDArray[np.int64]]:
        """Return the indices of the samples in each share of a batch, in ascending order."""
        divided = [[part[samples] for samples in self._divided(batch, part)] for part in batch.parts]
        return [np.sort(np.concatenate(of_updates)) for of_updates in zip(*divided, strict=True)]

    def share(self, batch: TrainBatch, number: int) -> TrainBatch:
        """Return share `number` of a whole batch, counted from 0. If there is only one share, return `batch` itself."""
        if self.shares == 1:
            return batch
        return batch.share(self.samples(batch)[number], whole_masks=self.whole_masks)

    def saved_tokens(self, batch: TrainBatch, part: NDArray[np.int64]) -> int:
        """Return the number of tokens of one update that no rank computes, because samples share their prompt.

        part: indices of the update's samples.
        """
        if not self.share_prompts or batch.group is None:
            return 0
        saved = 0
        for samples in (samples for share in self.micro_batches(batch, part) for samples in share):
            first = np.unique(batch.group[samples], return_index=True)[1]
            saved += int(batch.prompt_lengths[samples].sum() - batch.prompt_lengths[samples[first]].sum())
        return saved

    def shares_of(self, batch: TrainBatch) -> Iterator[TrainBatch]:
        """Yield all shares of a whole batch. Each share copies its tokens: release one before you request the next."""
        if self.shares == 1:
            yield batch
            return
        for samples in self.samples(batch):
            yield batch.share(samples, whole_masks=self.whole_masks)

    def _divided(self, batch: TrainBatch, part: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the samples of one update in each share, as indices into `part`."""
        if (groups := self._groups(batch, part)) is not None:
            return groups.divide(self.shares)
        return divide(batch.lengths[part], self.shares, by_tokens=self.max_tokens is not None and self.packed)

    def _groups(self, batch: TrainBatch, part: NDArray[np.int64]) -> GroupParts | None:
        """Return the parts of groups that share a prompt. None if samples share no prompt."""
        if not self.share_prompts or batch.group is None:
            return None
        return GroupParts.of(
            batch.prompt_lengths[part],
            batch.response_lengths[part],
            batch.group[part],
            self.shares,
            sequences=self.sequences,
            max_tokens=self.max_tokens,
        )


ONE_SHARE = BatchDivision(shares=1)
"""The division of a batch into a single share, which all ranks compute."""


def plan(
    lengths: NDArray[np.int64], ranks: int, *, sequences: int, max_tokens: int | None = None, packed: bool = False
) -> MicroBatchPlan:
    """Distribute samples over data-parallel ranks, and divide the samples of each rank into micro-batches.

    lengths: number of tokens of each sample, prompt and response together.
    ranks: number of data-parallel ranks.
    sequences: maximum number of samples per micro-batch. Used only if `max_tokens` is None.
    max_tokens: maximum number of tokens per micro-batch. A longer sample has a micro-batch of its own.
    packed: whether samples are packed without padding; otherwise padding counts towards `max_tokens`.

    Samples are sorted by length, so that a micro-batch needs little padding and ranks get nearly equal work. Every
    rank gets the same number of micro-batches, of which the last ones may be empty, because FSDP's collectives need the
    same number of calls on every rank.
    """
    shares = divide(lengths, ranks, by_tokens=max_tokens is not None and packed)
    if max_tokens is None:
        cuts = [_count(share, sequences) for share in shares]
    elif packed:
        cuts = [first_fit(lengths, share, max_tokens) for share in shares]
    else:
        cuts = [_pad(lengths, share, max_tokens) for share in shares]
    return _filled(cuts)


def _filled(cuts: MicroBatchPlan) -> MicroBatchPlan:
    """Append empty micro-batches, so that all ranks have the same number."""
    most = max(len(cut) for cut in cuts)
    empty = np.empty(0, dtype=np.int64)
    return [cut + [empty] * (most - len(cut)) for cut in cuts]


def divide(lengths: NDArray[np.int64], ranks: int, *, by_tokens: bool) -> list[NDArray[np.int64]]:
    """Distribute samples over data-parallel ranks. Return, for each rank, the indices of its samples, longest first.

    by_tokens: give ranks nearly equal numbers of tokens, by a greedy assignment. Otherwise ranks get equal numbers of
    samples, up to a difference of 1.
    """
    order = np.argsort(-lengths, kind="stable")
    return balance(lengths, order, ranks) if by_tokens else _in_turns(order, ranks)


def _in_turns(order: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Distribute samples in rounds, one per rank and round: to ranks 0 … r - 1, then to ranks r - 1 … 0, and so on.

    order: indices of the samples, longest first. The numbers of samples per rank differ by at most 1. Because the order
    of ranks alternates, no rank gets the longest sample of every round.
    """
    position = np.arange(len(order))
    place = position % ranks
    dealt = np.where(position // ranks % 2 == 0, place, ranks - 1 - place)
    return [order[dealt == rank] for rank in range(ranks)]


def _count(share: NDArray[np.int64], sequences: int) -> list[NDArray[np.int64]]:
    return [share[i : i + sequences] for i in range(0, len(share), sequences)]


def _pad(lengths: NDArray[np.int64], share: NDArray[np.int64], max_tokens: int) -> list[NDArray[np.int64]]:
    """Divide samples into micro-batches of at most `max_tokens` tokens, padding included.

    share: indices of the samples, longest first. A sample above the limit has a micro-batch of its own.
    """
    cuts: list[NDArray[np.int64]] = []
    start = 0
    while start < len(share):
        fitting = max(1, int(max_tokens // lengths[share[start]]))  # lengths decrease: the first sample is the longest
        cuts.append(share[start : start + fitting])
        start += fitting
    return cuts
