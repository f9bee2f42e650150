"""Which rank computes which samples together. Pure: every rank computes the same plan and takes its own part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

type Plan = list[list[NDArray[np.int64]]]
"""By rank, then by micro-batch: indices of samples. Every rank has as many micro-batches as every other."""


def plan(lengths: NDArray[np.int64], ranks: int, *, sequences: int, max_tokens: int | None = None) -> Plan:
    """Deal samples to ranks, and cut each rank's share into micro-batches.

    lengths: (N,) tokens of prompt and response.  sequences: samples per micro-batch.  max_tokens: instead, as many
    samples as keep count × longest within this number of padded tokens (at least one).
    Samples are sorted by length, so that a micro-batch pads little and ranks get equal work. A rank that runs out of
    samples gets empty micro-batches: FSDP's collectives need every rank as often.
    """
    order = np.argsort(-lengths, kind="stable")
    shares = [order[_snake(len(order), ranks) == rank] for rank in range(ranks)]
    cuts = [_cut(lengths[share], share, sequences, max_tokens) for share in shares]
    most = max(len(cut) for cut in cuts)
    empty = np.empty(0, dtype=np.int64)
    return [cut + [empty] * (most - len(cut)) for cut in cuts]


def _snake(count: int, ranks: int) -> NDArray[np.int64]:
    """Ranks 0…r-1, then r-1…0, and so on: the longest sample of each round goes to another rank each time."""
    position = np.arange(count)
    place = position % ranks
    return np.where(position // ranks % 2 == 0, place, ranks - 1 - place)


def _cut(
    lengths: NDArray[np.int64], samples: NDArray[np.int64], sequences: int, max_tokens: int | None
) -> list[NDArray[np.int64]]:
    if max_tokens is None:
        return [samples[i : i + sequences] for i in range(0, len(samples), sequences)]
    cuts: list[NDArray[np.int64]] = []
    start = 0
    while start < len(samples):
        fitting = max(1, int(max_tokens // lengths[start]))  # lengths fall: the first is the longest
        cuts.append(samples[start : start + fitting])
        start += fitting
    return cuts
