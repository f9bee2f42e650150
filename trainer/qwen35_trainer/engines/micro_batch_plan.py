"""The plan of an update: which rank computes which samples, and in which micro-batch.

The plan is a pure function: every rank computes the same plan and takes its own part.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

type MicroBatchPlan = list[list[NDArray[np.int64]]]
"""By rank, then by micro-batch: indices of samples. All ranks have the same number of micro-batches."""


def plan(
    lengths: NDArray[np.int64], ranks: int, *, sequences: int, max_tokens: int | None = None, packed: bool = False
) -> MicroBatchPlan:
    """Distribute samples over ranks, and divide each rank's share into micro-batches.

    lengths: (N,) tokens of prompt and response.  ranks: number of data-parallel ranks.  sequences: samples per
    micro-batch.  max_tokens: limit of tokens per micro-batch, used instead of `sequences`; a longer sample has a
    micro-batch of its own.  packed: samples are packed without padding, otherwise padding counts towards `max_tokens`.
    Samples are sorted by length, so that a micro-batch needs little padding and ranks get equal work. A rank with fewer
    micro-batches gets empty ones, because FSDP's collectives need the same number of calls on every rank.
    """
    shares = divide(lengths, ranks, by_tokens=max_tokens is not None and packed)
    if max_tokens is None:
        cuts = [_count(share, sequences) for share in shares]
    elif packed:
        cuts = [_pack(lengths, share, max_tokens) for share in shares]
    else:
        cuts = [_pad(lengths, share, max_tokens) for share in shares]
    most = max(len(cut) for cut in cuts)
    empty = np.empty(0, dtype=np.int64)
    return [cut + [empty] * (most - len(cut)) for cut in cuts]


def divide(lengths: NDArray[np.int64], ranks: int, *, by_tokens: bool) -> list[NDArray[np.int64]]:
    """Distribute samples over data-parallel ranks. Returns the share of each: indices of samples, longest first.

    by_tokens: give ranks equal numbers of tokens instead of equal numbers of samples.
    """
    order = np.argsort(-lengths, kind="stable")
    return _by_tokens(lengths, order, ranks) if by_tokens else _in_turns(order, ranks)


def _in_turns(order: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Distribute samples to ranks 0…r-1, then to r-1…0, and so on.

    The numbers of samples per rank differ by at most 1, and no rank gets the longest sample of every round.
    """
    position = np.arange(len(order))
    place = position % ranks
    dealt = np.where(position // ranks % 2 == 0, place, ranks - 1 - place)
    return [order[dealt == rank] for rank in range(ranks)]


def _by_tokens(lengths: NDArray[np.int64], order: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Give each sample, longest first, to the rank with the smallest number of tokens so far (Graham 1969).

    This balances the work, because the cost of packed samples depends on their tokens.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for sample in order.tolist():
        load, rank = heapq.heappop(loads)
        shares[rank].append(sample)
        heapq.heappush(loads, (load + int(lengths[sample]), rank))
    return [np.array(share, dtype=np.int64) for share in shares]


def _count(share: NDArray[np.int64], sequences: int) -> list[NDArray[np.int64]]:
    return [share[i : i + sequences] for i in range(0, len(share), sequences)]


def _pad(lengths: NDArray[np.int64], share: NDArray[np.int64], max_tokens: int) -> list[NDArray[np.int64]]:
    """Divide samples, longest first, into micro-batches of at most `max_tokens` tokens, padding included.

    A sample above the limit has a micro-batch of its own.
    """
    cuts: list[NDArray[np.int64]] = []
    start = 0
    while start < len(share):
        fitting = max(1, int(max_tokens // lengths[share[start]]))  # lengths decrease: the first sample is the longest
        cuts.append(share[start : start + fitting])
        start += fitting
    return cuts


def _pack(lengths: NDArray[np.int64], share: NDArray[np.int64], max_tokens: int) -> list[NDArray[np.int64]]:
    """Put each sample, longest first, into the first micro-batch that has room.

    This is first-fit decreasing, which needs at most 22 % more micro-batches than the optimum.
    """
    cuts: list[list[int]] = []
    room: list[int] = []
    for sample in share.tolist():
        length = int(lengths[sample])
        place = next((i for i, free in enumerate(room) if length <= free), len(room))
        if place == len(room):
            cuts.append([])
            room.append(max_tokens)
        cuts[place].append(sample)
        room[place] -= length
    return [np.array(cut, dtype=np.int64) for cut in cuts]
