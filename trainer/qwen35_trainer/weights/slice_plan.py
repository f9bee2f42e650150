"""Computes what a rank of a replica reads of a publication: the parts that contain its slices of the tensors. Pure.

    manifest, divisions, rank ─► what the rank holds of each tensor ─► the parts that contain it ─► bytes from each train rank

A part is read whole, because it has one checksum. Train ranks cut their shards into parts for replicas with a certain
number of ranks (`StagingPlan`): a part ends where the slice of a rank begins or ends. A rank of such a replica needs
either all values of a part or none. A rank of a replica with another number of ranks also reads parts of which it needs
only some values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen35_trainer.weights.division import Division, HeldSection, ReplicaRank, staged_runs
from qwen35_trainer.weights.weight_manifest import ITEM_BYTES, TensorEntry, TensorPart, WeightLayout, WeightManifest


@dataclass(frozen=True)
class RankSlices:
    """The slices of a version's tensors that one rank of a replica holds, and the manifest's parts that contain them."""

    held: Mapping[str, tuple[HeldSection, ...]]
    """Name of a tensor → the rank's part of each section of the tensor. Tensors without an entry are held whole."""
    parts: tuple[int, ...]
    """Indices of the parts that the rank reads, among the manifest's parts, in ascending order."""


def slices_of(manifest: WeightManifest, divisions: Mapping[str, Division], who: ReplicaRank) -> RankSlices:
    """Return the slices of a version's tensors that one rank of a replica holds, and the parts of the version to read.

    divisions: name of a tensor → how the ranks of the replica divide the tensor. If a tensor is missing here, each rank
    holds the whole tensor. who: the rank.
    """
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
    """Return a rank's part of each tensor that the rank does not need as a whole, by name.

    divisions: name of each tensor that the ranks of the replica divide → its division. who: the rank.
    """
    sections = {entry.name: divisions[entry.name].held(who) for entry in layout.tensors if entry.name in divisions}
    return {name: held for name, held in sections.items() if not _is_whole(held)}


def _is_whole(sections: Sequence[HeldSection]) -> bool:
    return all(len(each.outer) == each.section.outer and len(each.units) == each.section.units for each in sections)


def _byte_ranges(entry: TensorEntry, sections: Sequence[HeldSection]) -> list[range]:
    """Return the ranges of a tensor's staged bytes that contain the sections, in ascending order."""
    item = ITEM_BYTES[entry.dtype]
    runs = sorted((run.start, run.stop) for section in sections for run in staged_runs(section, entry.order))
    return [range(start * item, stop * item) for start, stop in runs]


def _touches(part: TensorPart, needed: Sequence[range]) -> bool:
    """Return whether a part contains a byte of one of the ranges. needed: ascending ranges that do not overlap."""
    before = bisect_right(needed, part.start + part.size - 1, key=lambda each: each.start)
    return before > 0 and needed[before - 1].stop > part.start
