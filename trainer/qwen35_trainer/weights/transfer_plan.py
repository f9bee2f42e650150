"""Computes the transfers of a publication: from the rows that train ranks hold to the slices that a replica's ranks compute with.

    train ranks (FSDP, rows)     tensor, divided by its rows        tensor, divided by its columns       whole on every rank
    0 ████                       replica rank 0 █████ needs         replica rank 0 █░ needs a part       replica rank 0 █
    1     ████                   of 0 and 1; rank 1 of 1 and 2      of each train rank; rank 1 ░█        replica rank 1 █
    2         ████

`engines/fsdp/published_shard.py` takes the rows of a rank from here. The transports move whole tensors, since a replica takes one device
yet; `benchmarks/weight_plan.py` adds up what larger replicas need.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of a publication, and how the ranks of a replica divide it."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    split: int | None
    """Dimension by which the ranks of a replica divide the tensor; None: each of these ranks needs the whole tensor."""


def row_range(rows: int, ranks: int, rank: int) -> range:
    """Return the rows that FSDP gives to rank `rank`, of `ranks` ranks, from a tensor of `rows` rows.

    Each rank gets the same number, rounded up, so that the last ranks may have fewer rows or none.
    """
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def transfers(tensors: Iterable[PlannedTensor], train_ranks: int, replica_ranks: int) -> dict[tuple[int, int], int]:
    """Return the bytes that each train rank sends to each rank of one replica, as (train rank, replica rank) → bytes.

    train_ranks: ranks of one copy of the model. replica_ranks: ranks of the replica, which share tensors or experts.
    """
    needed: defaultdict[tuple[int, int], int] = defaultdict(int)
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        row_bytes = math.prod(tensor.shape[1:]) * tensor.item_bytes
        for sender in range(train_ranks):
            held = row_range(rows, train_ranks, sender)
            for receiver in range(replica_ranks if held else 0):
                needed[sender, receiver] += _needed_bytes(tensor, held, row_bytes, replica_ranks, receiver)
    return {pair: size for pair, size in needed.items() if size}


def _needed_bytes(tensor: PlannedTensor, held: range, row_bytes: int, ranks: int, rank: int) -> int:
    """Return how many bytes of the rows `held`, which one train rank holds, a replica's rank `rank`, of `ranks`, needs.

    row_bytes: bytes of one row of the tensor.
    """
    if tensor.split is None:
        return len(held) * row_bytes
    slice_rows = row_range(tensor.shape[tensor.split], ranks, rank)
    if tensor.split == 0:
        return max(0, min(held.stop, slice_rows.stop) - max(held.start, slice_rows.start)) * row_bytes
    return len(held) * (row_bytes // tensor.shape[tensor.split]) * len(slice_rows)
