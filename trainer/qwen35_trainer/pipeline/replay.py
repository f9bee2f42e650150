"""What the records of a journal add up to, which of them cannot be, and what a lost one may have touched.

    Dispatched ─► held ──Train──────────────────► trained
                   ├─────Left: filtered, failed─► gone for good
                   └─────Left: discarded────────► returned ─► Dispatched again, as another group

Groups, batches and new prompts are numbered without a gap, and returned prompts come first, in order: a record that
breaks this shows that others are lost. Replaying goes on after damage, so that all of it is named at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from qwen35_trainer.pipeline.actions import Dispatched, Left, Reason, Train
from qwen35_trainer.pipeline.snapshot import Snapshot

SHOWN = 10
"""Damages and runs of numbers that a message spells out."""


@dataclass
class Extent:
    """Numbers that damage may have touched."""

    known: set[int] = field(default_factory=set)
    onwards: int | None = None
    """All from this one on; None when there is an end."""

    def __contains__(self, number: int) -> bool:
        return number in self.known or (self.onwards is not None and number >= self.onwards)

    def __bool__(self) -> bool:
        return bool(self.known) or self.onwards is not None

    def __str__(self) -> str:
        runs: list[list[int]] = []
        for number in sorted(self.known):
            if runs and number == runs[-1][-1] + 1:
                runs[-1][1:] = [number]
            else:
                runs.append([number])
        texts = [" to ".join(map(str, run)) for run in runs[:SHOWN]]
        rest = [f"more up to {runs[-1][-1]}"] if len(runs) > SHOWN else []
        return ", ".join(texts + rest + ([] if self.onwards is None else [f"{self.onwards} and after"]))


@dataclass(frozen=True)
class Damage:
    """Lines `first` to `last` of the journal, counted from 1, and what may have been on them."""

    first: int
    last: int
    what: str
    batches: Extent = field(default_factory=Extent)
    groups: Extent = field(default_factory=Extent)
    positions: Extent = field(default_factory=Extent)

    def __str__(self) -> str:
        where = f"line {self.first}" if self.first == self.last else f"lines {self.first} to {self.last}"
        extents = (("batches", self.batches), ("groups", self.groups), ("prompts", self.positions))
        touched = "; ".join(f"{name} {extent}" for name, extent in extents if extent)
        return f"{where}: {self.what}" + (f" (may concern {touched})" if touched else "")


class JournalDamaged(RuntimeError):
    """The journal cannot say where to go on. `damages`: every place, with what it may have touched."""

    def __init__(self, damages: Sequence[Damage]) -> None:
        self.damages = tuple(damages)
        lines = [f"  {damage}" for damage in self.damages[:SHOWN]]
        more = [f"  and {len(self.damages) - SHOWN} more places"] if len(self.damages) > SHOWN else []
        advice = (
            "Resume from the newest checkpoint itself, without the journal: it has its own position, and the batches "
            "after it train again."
        )
        super().__init__("\n".join(["the journal does not tell which prompts have trained", *lines, *more, advice]))


@dataclass
class _Numbers:
    """Numbers of one kind, which come without a gap."""

    next: int
    open: list[Extent] = field(default_factory=list)
    """Of lost lines since the last number: nobody knows yet how many they held."""
    passed: set[int] = field(default_factory=set)
    """Numbers that never came."""

    def lost(self) -> Extent:
        """A line is lost."""
        self.open.append(Extent(onwards=self.next))
        return self.open[-1]

    def see(self, number: int) -> bool:
        """The next number. Returns whether it may be: it follows, or what is missing was on lost lines."""
        possible = number == self.next or (number > self.next and bool(self.open))
        missing = range(self.next, number)
        for extent in self.open:
            extent.known.update(missing)
            extent.onwards = None
        self.open.clear()
        self.passed.update(missing)
        self.next = max(self.next, number + 1)
        return possible

    def may_be_lost(self, number: int) -> bool:
        """Whether a number that was not seen was passed over, or may be on a lost line."""
        return number in self.passed or (bool(self.open) and number >= self.next)


class Replay:
    """The state of scheduling after the records given so far. The same rules as the coordinator's own."""

    def __init__(self, start: Snapshot, held: Sequence[int] = ()) -> None:
        """`held`: numbers of groups, of which the first of `start.pending` are the prompts."""
        self._batches, self._groups = _Numbers(start.batch), _Numbers(start.group)
        self._positions = _Numbers(start.position)
        self._held = dict(zip(held, start.pending, strict=False))  # group → position, in order of dispatch
        self._returned = deque(start.pending[len(held) :])
        self._damages: list[Damage] = []
        self._lost: list[tuple[int, Extent, Extent]] = []  # next group at that point, groups and positions touched

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return self._batches.next

    @property
    def held(self) -> tuple[int, ...]:
        """Groups dispatched and not yet left, in order of dispatch."""
        return tuple(self._held)

    @property
    def snapshot(self) -> Snapshot:
        """Where the run stood; the prompts of what is held come first in `pending`."""
        pending = (*self._held.values(), *self._returned)
        return Snapshot(self._batches.next, self._positions.next, pending, self._groups.next)

    @property
    def damaged(self) -> bool:
        return bool(self._damages)

    def damages(self) -> tuple[Damage, ...]:
        """All damage, once every record is given. What is still held may have left on a line that was lost before."""
        for before, groups, positions in self._lost:
            suspects = {group: position for group, position in self._held.items() if group < before}
            groups.known.update(suspects)
            positions.known.update(suspects.values())
            if groups.onwards is not None:
                positions.known.update(self._returned)
        return tuple(self._damages)

    def lost(self, line: int, what: str) -> None:
        """A line that tells nothing."""
        last = self._damages[-1] if self._damages else None
        if last is not None and (last.last, last.what) == (line - 1, what):
            self._damages[-1] = Damage(last.first, line, what, last.batches, last.groups, last.positions)
            return
        before = self._groups.next
        damage = Damage(line, line, what, self._batches.lost(), self._groups.lost(), self._positions.lost())
        self._damages.append(damage)
        self._lost.append((before, damage.groups, damage.positions))

    def ends(self, line: int, batch: int) -> None:
        """There is no more, and the weights have trained all batches before `batch`."""
        if self.batch < batch:
            self.lost(line, f"the journal ends before batch {self.batch}, and the weights have trained {batch} batches")
            self._batches.see(batch)

    def apply(self, line: int, record: Dispatched | Left | Train) -> None:
        """The next record."""
        match record:
            case Dispatched():
                self._dispatched(line, record)
            case Left():
                self._left(line, record)
            case Train():
                self._trained(line, record)

    def _dispatched(self, line: int, record: Dispatched) -> None:
        group, expected = record.group, self._groups.next
        if not self._groups.see(group):
            what = f"group {group} is dispatched, and {expected} comes next"
            self._impossible(line, what, groups=range(expected, group) or (group,), positions=(record.position,))
        self._take_position(line, record)
        if group >= expected:
            self._held[group] = record.position

    def _take_position(self, line: int, record: Dispatched) -> None:
        position, new = record.position, self._positions.next
        expected = self._returned[0] if self._returned else new
        if position == expected:
            if self._returned:
                self._returned.popleft()
            else:
                self._positions.see(position)
            return
        skipped: list[int] = []
        if position in self._returned:
            skipped = list(islice(self._returned, self._returned.index(position)))
            self._returned = deque(islice(self._returned, len(skipped) + 1, None))
        elif position >= new:
            skipped = list(self._returned)
            self._returned.clear()
        if not self._damages:
            what = f"prompt {position} is dispatched, and {expected} comes next"
            touched = {position, *skipped, *range(new, position)}
            self._impossible(line, what, groups=(record.group,), positions=touched)
        for extent in self._positions.open or [self._damages[-1].positions]:
            extent.known.update(skipped)
        if position >= new:
            self._positions.see(position)

    def _left(self, line: int, record: Left) -> None:
        held = self._held.pop(record.group, None)
        if held != record.position and not (held is None and self._groups.may_be_lost(record.group)):
            what = f"group {record.group} of prompt {record.position} leaves, and is not held"
            touched = {record.position} if held is None else {record.position, held}
            self._impossible(line, what, groups=(record.group,), positions=touched)
        if record.reason is Reason.DISCARDED:
            self._returned.append(record.position)

    def _trained(self, line: int, record: Train) -> None:
        strangers = [
            group
            for group in record.groups
            if self._held.pop(group, None) is None and not self._groups.may_be_lost(group)
        ]
        if strangers:
            self._impossible(line, f"batch {record.batch} trains groups that are not held", groups=strangers)
        expected = self._batches.next
        if not self._batches.see(record.batch):
            what = f"batch {record.batch} trains, and {expected} comes next"
            self._impossible(line, what, groups=record.groups, batches=range(expected, record.batch) or (record.batch,))

    def _impossible(
        self,
        line: int,
        what: str,
        *,
        groups: Iterable[int],
        positions: Iterable[int] = (),
        batches: Iterable[int] = (),
    ) -> None:
        """A record that cannot follow those before it."""
        damage = Damage(line, line, what, Extent(set(batches)), Extent(set(groups)), Extent(set(positions)))
        self._damages.append(damage)
