"""Divides a tensor among the ranks of a replica (tensor or expert parallelism), and orders its values for staging. Pure.

    one section    (outer, units, unit) values; the ranks divide the second dimension, `units`
    two ranks      outer = 1: rows of a matrix            outer = rows: columns of a matrix
                   ██████  rank 0                         ███▒▒▒   rank 0 │ rank 1
                   ▒▒▒▒▒▒  rank 1                         ███▒▒▒

    several        q │ k │ v: the ranks divide each section
    sections

Train ranks *stage* a version: they copy their shards to where replicas can read them. The part of a replica's rank is
consecutive in the tensor if outer is 1. Otherwise it is spread over the whole tensor, in runs that may be as short as 256 bytes.
Such a tensor is staged in blocks (`BlockOrder`): the first block of all rows, then the second block of all rows, and so on. The
part of a rank is then consecutive, so that it can be read by few transfers and has its own checksums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """The number of ranks among which a replica divides its tensors, and whether each rank has whole experts."""

    ranks: int = 1
    divides_experts: bool = False
    """Whether each rank computes with some whole experts (expert parallelism).

    Otherwise each rank computes with a part of every expert (tensor parallelism).
    """


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """One rank of a replica: its number, counted from 0, and the shape of the replica."""

    rank: int
    replica: ReplicaShape

    @property
    def ranks(self) -> int:
        """Number of ranks of the replica."""
        return self.replica.ranks


@dataclass(frozen=True, slots=True)
class TensorSection:
    """Consecutive values of a tensor, seen as an array of the shape (outer, units, unit).

    Ranks divide the second dimension. With expert parallelism, they divide the first dimension of a tensor of experts.
    """

    outer: int
    units: int
    unit: int

    @property
    def size(self) -> int:
        """Number of values of the section."""
        return self.outer * self.units * self.unit


@dataclass(frozen=True, slots=True)
class Division:
    """The division of one tensor among the ranks of a replica."""

    sections: tuple[TensorSection, ...]
    """The sections of which the tensor consists, in order."""
    padding: int = 1
    """Before the division, the number of units is rounded up to a multiple of this number.

    The added units are not published, so the last ranks may have fewer units than the others.
    """
    experts: int = 0
    """Number of experts in the tensor; 0 if it contains none.

    A tensor of experts has one section, whose first dimension consists of equal parts for the experts. With expert
    parallelism, the ranks divide these parts instead of the units.
    """

    def held(self, who: ReplicaRank) -> tuple[HeldSection, ...]:
        """Return, for each section, the part that a rank holds.

        The part is the whole section if the ranks cannot divide the section.
        """
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
        """Return the block order in which the tensor is staged for replicas of this shape.

        None: it is staged in the order of its values.
        """
        section = self.sections[0]
        if replica.ranks == 1 or len(self.sections) > 1 or section.outer == 1 or section.units % replica.ranks:
            return None
        return None if replica.divides_experts and self.experts else BlockOrder(section.outer, replica.ranks)

    def cuts(self, replica: ReplicaShape) -> tuple[int, ...]:
        """Return the ascending indices of the tensor's values at which a rank's part begins or ends.

        The result is empty for a tensor that is staged in blocks, because each block is the part of one rank.
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
    """The part of a `TensorSection` that one rank holds.

    The section is seen as an array of the shape (outer, units, unit). The part is a range of the first dimension and a
    range of the second one, with the whole last dimension.
    """

    section: TensorSection
    start: int
    """Index of the section's first value in the flattened tensor."""
    outer: range
    units: range

    @property
    def values(self) -> int:
        """Number of values of the part."""
        return len(self.outer) * len(self.units) * self.section.unit


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order in which a tensor is staged in blocks of columns.

    The values, seen as (outer, blocks, inner), are stored as (blocks, outer, inner).
    """

    outer: int
    blocks: int


def staged_runs(held: HeldSection, order: BlockOrder | None) -> Iterator[range]:
    """Yield ranges of a tensor's staged values that together contain a rank's part of a section.

    held: the part. order: block order in which the tensor is staged; None: the order of its values. If the tensor is
    not staged for the shape of the rank's replica, the ranges may also contain values of other ranks.
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
    """Consecutive staged values of one tensor.

    In the shard from which they are copied, they are `rows` runs of `width` values.
    """

    start: int
    """Index of the piece's first value among the staged values of the tensor."""
    first: int
    """Index of the piece's first value in the shard."""
    rows: int
    width: int
    stride: int
    """Number of values from the start of one run to the start of the next one in the shard."""

    @property
    def size(self) -> int:
        """Number of values of the piece."""
        return self.rows * self.width


@dataclass(frozen=True)
class StagingPlan:
    """The places at which train ranks cut their shards into pieces, and the orders in which they stage the values.

    The plan is made for replicas of one shape: each rank of such a replica needs all values of a piece, or none
    of them.
    """

    orders: Mapping[str, BlockOrder] = field(default_factory=dict)
    """Name of a tensor that is staged in blocks → its block order."""
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a tensor that is not staged in blocks → indices, ascending, of the values at which a piece must end."""

    @classmethod
    def of(cls, divisions: Mapping[str, Division], replica: ReplicaShape) -> StagingPlan:
        """Return the plan for replicas of one shape. It is empty if each of these replicas has a single rank.

        divisions: name of each tensor that the ranks divide → its division.
        """
        if replica.ranks == 1:
            return cls()
        orders = {name: order for name, each in divisions.items() if (order := each.order(replica)) is not None}
        return cls(orders, {name: each.cuts(replica) for name, each in divisions.items() if name not in orders})

    def pieces(self, name: str, size: int, held: range, most: int) -> Iterator[StagedPiece]:
        """Yield the pieces in which a train rank stages its shard of the tensor `name`.

        size: number of values of the whole tensor. held: indices of the shard's values in the flattened tensor. most:
        maximum number of values of a piece. A row of a block is never divided, even if it has more values. Raises
        ValueError if the tensor is staged in blocks and the shard does not consist of whole rows.
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
"""The plan without cuts and block orders: each tensor is staged in the order of its values."""


def unit_range(units: int, who: ReplicaRank) -> range:
    """Return the units that a rank holds.

    If the number of units is a multiple of the number of ranks, all ranks hold equally many units. If the number of
    ranks is a multiple of the number of units, each rank holds one unit, which several ranks may hold. Otherwise
    each rank holds all units.
    """
    if units % who.ranks == 0:
        each = units // who.ranks
        return range(who.rank * each, (who.rank + 1) * each)
    if who.ranks % units == 0:
        unit = who.rank // (who.ranks // units)
        return range(unit, unit + 1)
    return range(units)


def _expert_range(experts: int, who: ReplicaRank) -> range:
    """Return the experts of a rank, which are consecutive.

    If they cannot be divided equally, the first ranks have one more.
    """
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
    """Return the division of a tensor by its rows.

    units: number of equal groups of rows that are not divided further, such as heads; None: each row is a unit.
    padding: as in `Division`.
    """
    rows, row = shape[0], math.prod(shape[1:])
    units = rows if units is None else units
    return Division((TensorSection(1, units, rows // units * row),), padding)


def columns_divided(shape: tuple[int, ...]) -> Division:
    """Return the division that gives each rank a part of the last dimension of a tensor."""
    return Division((TensorSection(math.prod(shape[:-1]), shape[-1], 1),))
