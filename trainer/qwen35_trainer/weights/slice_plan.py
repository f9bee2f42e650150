"""Computes what a rank of a replica reads of a publication: the parts that contain its slices of the tensors. Pure.

    manifest, divisions, rank ─► of each tensor what the rank holds ─► the parts that contain it ─► bytes from each train rank

A part is read whole, because it has one checksum. Train ranks cut their shards where the slices of a rank of a replica begin and end
(`StagingPlan`), so that a part contains values of one rank only. Replicas of another number of ranks read some parts of which they need a half.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen35_trainer.weights.division import Division, HeldSection, ReplicaRank, staged_runs
from qwen35_trainer.weights.weight_manifest import ITEM_BYTES, TensorEntry, TensorPart, WeightLayout, WeightManifest


@dataclass(frozen=True)
class RankSlices:
    """The part of a version that one rank of a replica holds."""

    held: Mapping[str, tuple[HeldSection, ...]]
    """Name of a tensor → the rank's part of it. Tensors without an entry are held whole."""
    parts: tuple[int, ...]
    """Numbers of the manifest's parts that the rank reads, in ascending order."""


def slices_of(manifest: WeightManifest, divisions: Mapping[str, Division], who: ReplicaRank) -> RankSlices:
    """Return what a rank of a replica needs of a version. divisions: of the tensors that the replica's ranks divide."""
    held = held_sections(manifest.layout, divisions, who)
    needed = {  # in bytes
        number: _byte_ranges(entry, held[entry.name])
        for number, entry in enumerate(manifest.layout.tensors)
        if entry.name in held
    }
    parts = (
        n for n, part in enumerate(manifest.parts) if part.tensor not in needed or _touches(part, needed[part.tensor])
    )
    return RankSlices(held, tuple(parts))


def held_sections(
    layout: WeightLayout, divisions: Mapping[str, Division], who: ReplicaRank
) -> dict[str, tuple[HeldSection, ...]]:
    """Return a rank's part of each tensor of which it does not need everything. divisions: as in `slices_of`."""
    sections = {entry.name: divisions[entry.name].held(who) for entry in layout.tensors if entry.name in divisions}
    return {name: held for name, held in sections.items() if not _is_whole(held)}


def _is_whole(sections: Sequence[HeldSection]) -> bool:
    return all(len(each.outer) == each.section.outer and len(each.units) == each.section.units for each in sections)


def _byte_ranges(entry: TensorEntry, sections: Sequence[HeldSection]) -> list[range]:
    """Return the ranges of staged bytes that contain the sections, in ascending order."""
    item = ITEM_BYTES[entry.dtype]
    runs = sorted((run.start, run.stop) for section in sections for run in staged_runs(section, entry.order))
    return [range(start * item, stop * item) for start, stop in runs]


def _touches(part: TensorPart, needed: Sequence[range]) -> bool:
    """Return whether a part has a byte of one of the ranges, which ascend and do not overlap."""
    before = bisect_right(needed, part.start + part.size - 1, key=lambda each: each.start)
    return before > 0 and needed[before - 1].stop > part.start
