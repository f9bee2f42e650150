"""Computes the transfers of a publication (resharding): from the rows of train ranks to the slices of a replica's ranks. Pure.

    train ranks (FSDP, rows)     tensor, divided by its rows        tensor, divided by its columns       whole on every rank
    0 ████                       replica rank 0 █████ needs         replica rank 0 █░ needs a part       replica rank 0 █
    1     ████                   of 0 and 1; rank 1 of 1 and 2      of each train rank; rank 1 ░█        replica rank 1 █
    2         ████

`engines/fsdp/published_shard.py` takes the rows of a rank from here. The rest is for `benchmarks/weight_plan.py`: the parts that train ranks
would stage (`division`) and that ranks of a replica would read (`slice_plan`), without tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from qwen35_trainer.weights.division import Division, ReplicaRank, ReplicaShape, StagingPlan
from qwen35_trainer.weights.slice_plan import slices_of
from qwen35_trainer.weights.weight_manifest import ITEM_BYTES, TensorPart, WeightLayout, WeightManifest


@dataclass(frozen=True)
class PlannedVersion:
    """The parts of a version as train ranks would stage them, computed without tensors. All checksums are 0."""

    manifest: WeightManifest
    writers: tuple[int, ...]
    """Number of the train rank that would stage each part, in the order of the manifest's parts."""


class HeldValues(NamedTuple):
    """Consecutive values of one tensor that a train rank publishes."""

    rank: int
    tensor: int
    """Number of the tensor in the layout of the version."""
    values: range
    """Indices into the flattened tensor."""


def row_range(rows: int, ranks: int, rank: int) -> range:
    """Return the rows of a tensor with `rows` rows that FSDP gives to rank `rank` of `ranks` ranks.

    Each rank gets the same number of rows, rounded up, so that the last ranks may have fewer rows or none.
    """
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def held_by_rows(layout: WeightLayout, ranks: int) -> Iterator[HeldValues]:
    """Yield the values of each tensor that FSDP gives to each of `ranks` ranks. Rank 0 holds tensors without dimensions."""
    for rank in range(ranks):
        for number, entry in enumerate(layout.tensors):
            row = math.prod(entry.shape[1:])
            rows = row_range(entry.shape[0] if entry.shape else 1, ranks, rank)
            yield HeldValues(rank, number, range(rows.start * row, rows.stop * row))


def planned_version(layout: WeightLayout, plan: StagingPlan, held: Iterable[HeldValues], most: int) -> PlannedVersion:
    """Return the parts that train ranks would stage for a version.

    plan: the staging plan from which the layout was computed. held: the values that each rank would publish. most: maximum
    number of bytes of a part.
    """
    parts: list[TensorPart] = []
    writers: list[int] = []
    for rank, number, values in held:
        entry = layout.tensors[number]
        item = ITEM_BYTES[entry.dtype]
        for piece in plan.pieces(entry.name, math.prod(entry.shape), values, most // item):
            parts.append(TensorPart(number, piece.start * item, piece.size * item, 0))
            writers.append(rank)
    return PlannedVersion(WeightManifest(0, layout, tuple(parts)), tuple(writers))


def transfers(
    version: PlannedVersion, divisions: Mapping[str, Division], replica: ReplicaShape
) -> dict[tuple[int, int], int]:
    """Return how many bytes each rank of one replica reads from each train rank: (train rank, replica rank) → bytes.

    divisions: name of each tensor that the ranks of the replica divide → its division. replica: shape of the replica.
    Pairs without bytes are left out.
    """
    needed = Counter[tuple[int, int]]()
    parts = version.manifest.parts
    for rank in range(replica.ranks):
        for number in slices_of(version.manifest, divisions, ReplicaRank(rank, replica)).parts:
            needed[version.writers[number], rank] += parts[number].size
    return dict(needed)
