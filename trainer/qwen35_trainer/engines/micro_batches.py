"""Which rank computes which samples together. Pure: every rank computes the same plan and takes its own part."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

type Plan = list[list[NDArray[np.int64]]]
"""By rank, then by micro-batch: indices of samples. Every rank has as many micro-batches as every other."""


def plan(
    lengths: NDArray[np.int64], ranks: int, *, sequences: int, max_tokens: int | None = None, packed: bool = False
) -> Plan:
    """Deal samples to ranks, and cut each rank's share into micro-batches.

    lengths: (N,) tokens of prompt and response.  ranks: data-parallel ones.  sequences: samples per micro-batch.
    max_tokens: instead, as many samples as hold this number of tokens (at least one); packed: padding is no token.
    Samples are sorted by length, so that a micro-batch pads little and ranks get equal work. A rank that runs out of
    samples gets empty micro-batches: FSDP's collectives need every rank as often.
    """
    order = np.argsort(-lengths, kind="stable")
    if max_tokens is None:
        cuts = [_count(share, sequences) for share in _in_turns(order, ranks)]
    elif packed:
        cuts = [_pack(lengths, share, max_tokens) for share in _by_tokens(lengths, order, ranks)]
    else:
        cuts = [_pad(lengths, share, max_tokens) for share in _in_turns(order, ranks)]
    most = max(len(cut) for cut in cuts)
    empty = np.empty(0, dtype=np.int64)
    return [cut + [empty] * (most - len(cut)) for cut in cuts]


def _in_turns(order: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """To ranks 0…r-1, then r-1…0, and so on: equal counts, and the longest of each round goes to another rank."""
    position = np.arange(len(order))
    place = position % ranks
    dealt = np.where(position // ranks % 2 == 0, place, ranks - 1 - place)
    return [order[dealt == rank] for rank in range(ranks)]


def _by_tokens(lengths: NDArray[np.int64], order: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Each sample, longest first, to the rank that has the fewest tokens (Graham 1969): work follows tokens here."""
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
    """Runs of falling lengths within count × longest tokens."""
    cuts: list[NDArray[np.int64]] = []
    start = 0
    while start < len(share):
        fitting = max(1, int(max_tokens // lengths[share[start]]))  # lengths fall: the first is the longest
        cuts.append(share[start : start + fitting])
        start += fitting
    return cuts


def _pack(lengths: NDArray[np.int64], share: NDArray[np.int64], max_tokens: int) -> list[NDArray[np.int64]]:
    """Each sample, longest first, into the first micro-batch that has room (first-fit decreasing: within 22 % of the
    fewest possible).
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
