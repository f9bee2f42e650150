"""Divides a tensor among the ranks of a replica, and defines in which order the tensor is staged for them. Pure.

    one section    (outer, units, unit) values; the ranks divide `units`
    two ranks      outer = 1: rows of a matrix            outer = rows: columns of a matrix
                   ██████  rank 0                         ███▒▒▒   rank 0 │ rank 1
                   ▒▒▒▒▒▒  rank 1                         ███▒▒▒

    several        q │ k │ v: each of them is divided
    sections

A rank's part of a tensor is consecutive if outer is 1. Otherwise it is spread over the whole tensor, in runs that may be as short as 256
bytes. Such a tensor is staged in blocks (`BlockOrder`): the first block of all rows, then the second one …, so that
a rank's part is consecutive again, can be read by few transfers, and has checksums of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Number of ranks of a replica, which divide the tensors among them, and how they divide experts."""

    ranks: int = 1
    divides_experts: bool = False
    """Whether each rank computes with some whole experts (expert parallelism).

    Otherwise each rank computes with a part of every expert.
    """


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """One rank of a replica, from 0."""

    rank: int
    replica: ReplicaShape

    @property
    def ranks(self) -> int:
        """Number of ranks of the replica."""
        return self.replica.ranks


@dataclass(frozen=True, slots=True)
class TensorSection:
    """Consecutive values of a tensor, of the shape (outer, units, unit), of which ranks divide the second dimension."""

    outer: int
    units: int
    unit: int

    @property
    def size(self) -> int:
        """Number of values."""
        return self.outer * self.units * self.unit


@dataclass(frozen=True, slots=True)
class Division:
    """The division of one tensor among the ranks of a replica."""

    sections: tuple[TensorSection, ...]
    """The sections that together are the tensor."""
    padding: int = 1
    """The number of units is rounded up to a multiple of this number before it is divided. The units added are not published."""
    experts: int = 0
    """Number of experts, by which `outer` of the only section can be divided instead of its units. 0: not experts."""

    def held(self, who: ReplicaRank) -> tuple[HeldSection, ...]:
        """Return what a rank computes with: a part of each section, or all of it where the ranks cannot divide it."""
        starts = _starts(self.sections)
        return tuple(self._held(section, start, who) for section, start in zip(self.sections, starts, strict=True))

    def _held(self, section: TensorSection, start: int, who: ReplicaRank) -> HeldSection:
        if who.replica.divides_experts and self.experts:
            outer = _expert_range(self.experts, who)
            each = section.outer // self.experts
            return HeldSection(section, start, range(outer.start * each, outer.stop * each), range(section.units))
        units = -(-section.units // self.padding) * self.padding
        divided = unit_range(units, who)
        return HeldSection(
            section,
            start,
            range(section.outer),
            range(min(divided.start, section.units), min(divided.stop, section.units)),
        )

    def order(self, replica: ReplicaShape) -> BlockOrder | None:
        """Return the order in which the tensor is staged for the ranks of a replica. None: the order of its values."""
        section = self.sections[0]
        if replica.ranks == 1 or len(self.sections) > 1 or section.outer == 1 or section.units % replica.ranks:
            return None
        return None if replica.divides_experts and self.experts else BlockOrder(section.outer, replica.ranks)

    def cuts(self, replica: ReplicaShape) -> tuple[int, ...]:
        """Return the numbers of the values at which the part of a replica's rank begins or ends.

        They are empty for a tensor that is staged in blocks, which are such parts themselves.
        """
        if self.order(replica) is not None:
            return ()
        bounds = set[int]()
        for rank in range(replica.ranks):
            for held in self.held(ReplicaRank(rank, replica)):
                bounds |= {bound for run in staged_runs(held, None) for bound in (run.start, run.stop)}
        return tuple(sorted(bounds))


@dataclass(frozen=True, slots=True)
class HeldSection:
    """The part of a section that a rank computes with: some of `outer`, and of each of these some units."""

    section: TensorSection
    start: int
    """Number of the section's first value in the tensor."""
    outer: range
    units: range

    @property
    def values(self) -> int:
        """Number of values of the part."""
        return len(self.outer) * len(self.units) * self.section.unit


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order of a tensor of the shape (outer, blocks, inner), staged as (blocks, outer, inner)."""

    outer: int
    blocks: int


def staged_runs(held: HeldSection, order: BlockOrder | None) -> Iterator[range]:
    """Yield ranges of the staged values of a tensor that contain what a rank holds of a section.

    They contain more if the tensor is staged in another order than the rank's replica divides it.
    """
    section, unit = held.section, held.section.unit
    if not held.values:
        return
    width = section.units * unit
    first, last = held.units.start * unit, held.units.stop * unit
    inner, blocks = (width, 1) if order is None else (width // order.blocks, order.blocks)
    for block in range(blocks):
        begin, end = max(first - block * inner, 0), min(last - block * inner, inner)
        if begin < end:
            place = held.start + block * section.outer * inner
            yield range(place + held.outer.start * inner + begin, place + (held.outer.stop - 1) * inner + end)


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """Consecutive staged values of one tensor, of which a shard has `rows` runs of `width` values."""

    start: int
    """Number of the first one among the tensor's staged values."""
    first: int
    """Number of the first one among the shard's values."""
    rows: int
    width: int
    stride: int
    """Number of the shard's values from the start of one run to the start of the next one."""

    @property
    def size(self) -> int:
        """Number of values."""
        return self.rows * self.width


@dataclass(frozen=True)
class StagingPlan:
    """The places at which train ranks cut their shards, and the orders in which they stage the values.

    With these, each part that a rank of a replica reads contains values of this rank only.
    """

    orders: Mapping[str, BlockOrder] = field(default_factory=dict)
    """Name of a tensor that is staged in blocks → their order."""
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a tensor → numbers of the values at which a piece ends, so that no piece contains values of two ranks."""

    @classmethod
    def of(cls, divisions: Mapping[str, Division], replica: ReplicaShape) -> StagingPlan:
        """Return the plan for the ranks of replicas of one shape. With one rank, everything is staged whole."""
        if replica.ranks == 1:
            return cls()
        orders = {name: order for name, each in divisions.items() if (order := each.order(replica)) is not None}
        return cls(orders, {name: each.cuts(replica) for name, each in divisions.items() if name not in orders})

    def pieces(self, name: str, size: int, held: range, most: int) -> Iterator[StagedPiece]:
        """Yield the pieces in which a rank stages its shard of a tensor.

        size: number of values of the tensor. held: numbers of the consecutive values that the shard has. most: maximum number
        of values of a piece. Raises ValueError if a tensor that is staged in blocks is not sharded by rows.
        """
        order = self.orders.get(name)
        if order is None:
            bounds = sorted({held.start, held.stop, *(cut for cut in self.cuts.get(name, ()) if cut in held)})
            for begin, end in pairwise(bounds):
                for first in range(begin, end, most):
                    count = min(most, end - first)
                    yield StagedPiece(first, first - held.start, 1, count, count)
            return
        width = size // order.outer
        inner = width // order.blocks
        if held.start % width or len(held) % width:
            raise ValueError(
                f"{name}: a shard of values {held.start} to {held.stop} does not consist of rows of {width} values"
            )
        rows, at_once = range(held.start // width, held.stop // width), max(1, most // inner)
        for block in range(order.blocks):
            for row in range(rows.start, rows.stop, at_once):
                first = (row - rows.start) * width + block * inner
                start = (block * order.outer + row) * inner
                yield StagedPiece(start, first, min(at_once, rows.stop - row), inner, width)


WHOLE = StagingPlan()
"""The plan in which all tensors are staged in the order of their values."""


def unit_range(units: int, who: ReplicaRank) -> range:
    """Return the units of a rank.

    With fewer units than ranks, several ranks have the same unit. All units if neither number divides the other.
    """
    if units % who.ranks == 0:
        each = units // who.ranks
        return range(who.rank * each, (who.rank + 1) * each)
    if who.ranks % units == 0:
        unit = who.rank // (who.ranks // units)
        return range(unit, unit + 1)
    return range(units)


def _expert_range(experts: int, who: ReplicaRank) -> range:
    """Return the experts of a rank: consecutive ones, of which the first ranks have one more if there is a remainder."""
    each, more = divmod(experts, who.ranks)
    start = who.rank * each + min(who.rank, more)
    return range(start, start + each + (who.rank < more))


def _starts(sections: tuple[TensorSection, ...]) -> list[int]:
    starts, end = [], 0
    for section in sections:
        starts.append(end)
        end += section.size
    return starts


def rows_divided(shape: tuple[int, ...], units: int | None = None, padding: int = 1) -> Division:
    """Return the division of a tensor by its rows. units: number of units into which the rows are grouped; None: each row is one."""
    rows, row = shape[0], math.prod(shape[1:])
    units = rows if units is None else units
    return Division((TensorSection(1, units, rows // units * row),), padding)


def columns_divided(shape: tuple[int, ...]) -> Division:
    """Return the division of a tensor by its last dimension."""
    return Division((TensorSection(math.prod(shape[:-1]), shape[-1], 1),))
