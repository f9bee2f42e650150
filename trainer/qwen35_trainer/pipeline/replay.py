"""The state that a journal's records lead to, with checks that they form an unbroken sequence.

    GroupDispatched ─► held ──TrainGroups─────────────────────► trained
                        ├─────GroupLeft: filtered, failed────► left for good
                        └─────GroupLeft: discarded───────────► returned ─► GroupDispatched again, as another group

Groups, batches and new prompts are numbered without gaps, and returned prompts come first, in order. A record that
violates this shows that other records are lost. Replay continues after damage, so that one error lists all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.pipeline.actions import GroupDispatched, GroupLeft, LeaveReason, TrainGroups
from qwen35_trainer.pipeline.scheduling_snapshot import SchedulingSnapshot

MAX_SHOWN = 10
"""Maximum number of damages, and of ranges of numbers, in a message."""


@dataclass
class NumberSet:
    """The batches, groups or prompts that damage may concern."""

    listed: set[int] = field(default_factory=set)
    all_from: int | None = None
    """All numbers from this one on belong to the set. None: the set is finite."""

    def __contains__(self, number: int) -> bool:
        return number in self.listed or (self.all_from is not None and number >= self.all_from)

    def __bool__(self) -> bool:
        return bool(self.listed) or self.all_from is not None

    def __str__(self) -> str:
        ranges: list[list[int]] = []
        for number in sorted(self.listed):
            if ranges and number == ranges[-1][-1] + 1:
                ranges[-1][1:] = [number]
            else:
                ranges.append([number])
        texts = [" to ".join(map(str, ends)) for ends in ranges[:MAX_SHOWN]]
        more = [f"more up to {ranges[-1][-1]}"] if len(ranges) > MAX_SHOWN else []
        return ", ".join(texts + more + ([] if self.all_from is None else [f"{self.all_from} and after"]))


@dataclass(frozen=True)
class Damage:
    """Lines `first` to `last` of the journal, counted from 1, and the numbers that may have been on them."""

    first: int
    last: int
    message: str
    batches: NumberSet = field(default_factory=NumberSet)
    groups: NumberSet = field(default_factory=NumberSet)
    positions: NumberSet = field(default_factory=NumberSet)

    def __str__(self) -> str:
        where = f"line {self.first}" if self.first == self.last else f"lines {self.first} to {self.last}"
        number_sets = (("batches", self.batches), ("groups", self.groups), ("prompts", self.positions))
        concerned = "; ".join(f"{name} {numbers}" for name, numbers in number_sets if numbers)
        return f"{where}: {self.message}" + (f" (may concern {concerned})" if concerned else "")


class JournalDamaged(RuntimeError):
    """The journal does not determine where the run continues. `damages` lists every damaged place."""

    failure = FailureReason.JOURNAL_DAMAGED

    def __init__(self, damages: Sequence[Damage]) -> None:
        self.damages = tuple(damages)
        lines = [f"  {damage}" for damage in self.damages[:MAX_SHOWN]]
        more = [f"  and {len(self.damages) - MAX_SHOWN} more places"] if len(self.damages) > MAX_SHOWN else []
        advice = (
            "Resume from the newest checkpoint itself, without the journal: it has its own position, and the batches "
            "after it train again."
        )
        super().__init__("\n".join(["the journal does not tell which prompts have trained", *lines, *more, advice]))


@dataclass
class _Numbers:
    """The numbers of batches, groups or prompts, which have no gaps in an undamaged journal."""

    next: int
    open: list[NumberSet] = field(default_factory=list)
    """One for each line lost since the last number. The next number shows how many numbers were on them."""
    missing: set[int] = field(default_factory=set)
    """Numbers that were skipped."""

    def add_lost_line(self) -> NumberSet:
        """Note that a line is lost. Returns the numbers that may have been on it, which later records narrow down."""
        self.open.append(NumberSet(all_from=self.next))
        return self.open[-1]

    def advance_to(self, number: int) -> bool:
        """Note the next number. Returns whether it is possible: it follows, or the skipped ones were on lost lines."""
        possible = number == self.next or (number > self.next and bool(self.open))
        skipped = range(self.next, number)
        for numbers in self.open:
            numbers.listed.update(skipped)
            numbers.all_from = None
        self.open.clear()
        self.missing.update(skipped)
        self.next = max(self.next, number + 1)
        return possible

    def may_be_lost(self, number: int) -> bool:
        """Whether a number was skipped, or may be on a lost line."""
        return number in self.missing or (bool(self.open) and number >= self.next)


class Replay:
    """The state of scheduling after the records applied so far. It follows the coordinator's rules."""

    def __init__(self, start: SchedulingSnapshot, held: Sequence[int] = ()) -> None:
        """`held`: the groups whose prompts are the first of `start.pending`, in this order."""
        self._batches, self._groups = _Numbers(start.batch), _Numbers(start.group)
        self._positions = _Numbers(start.position)
        self._held = dict(zip(held, start.pending, strict=False))  # group → position, in order of dispatch
        self._returned = deque(start.pending[len(held) :])
        self._damages: list[Damage] = []
        self._lost_lines: list[tuple[int, NumberSet, NumberSet]] = []  # (next group then, groups, positions)

    @property
    def batch(self) -> int:
        """The number of the next batch."""
        return self._batches.next

    @property
    def held(self) -> tuple[int, ...]:
        """The groups that were dispatched and have not left, in order of dispatch."""
        return tuple(self._held)

    @property
    def snapshot(self) -> SchedulingSnapshot:
        """The state of the run. The prompts of held groups come first in `pending`."""
        pending = (*self._held.values(), *self._returned)
        return SchedulingSnapshot(self._batches.next, self._positions.next, pending, self._groups.next)

    @property
    def is_damaged(self) -> bool:
        return bool(self._damages)

    def damages(self) -> tuple[Damage, ...]:
        """Return all damage; call it after the last record. A group that is still held may have left on a lost line."""
        for next_group, groups, positions in self._lost_lines:
            candidates = {group: position for group, position in self._held.items() if group < next_group}
            groups.listed.update(candidates)
            positions.listed.update(candidates.values())
            if groups.all_from is not None:
                positions.listed.update(self._returned)
        return tuple(self._damages)

    def add_lost_line(self, line: int, message: str) -> None:
        """Note a line without a usable record. Adjacent lines with the same fault count as one damage."""
        previous = self._damages[-1] if self._damages else None
        if previous is not None and (previous.last, previous.message) == (line - 1, message):
            self._damages[-1] = replace(previous, last=line)
            return
        next_group = self._groups.next
        lost = (self._batches.add_lost_line(), self._groups.add_lost_line(), self._positions.add_lost_line())
        damage = Damage(line, line, message, *lost)
        self._damages.append(damage)
        self._lost_lines.append((next_group, damage.groups, damage.positions))

    def end(self, line: int, batch: int) -> None:
        """Note the end of the journal, for weights that have trained all batches before `batch`."""
        if self.batch < batch:
            message = f"the journal ends before batch {self.batch}, and the weights have trained {batch} batches"
            self.add_lost_line(line, message)
            self._batches.advance_to(batch)

    def apply(self, line: int, record: GroupDispatched | GroupLeft | TrainGroups) -> None:
        """Apply the next record."""
        match record:
            case GroupDispatched():
                self._dispatched(line, record)
            case GroupLeft():
                self._left(line, record)
            case TrainGroups():
                self._trained(line, record)

    def _dispatched(self, line: int, record: GroupDispatched) -> None:
        group, expected = record.group, self._groups.next
        if not self._groups.advance_to(group):
            message = f"group {group} is dispatched, and {expected} comes next"
            groups = range(expected, group) or (group,)
            self._add_impossible(line, message, groups=groups, positions=(record.position,))
        self._take_position(line, record)
        if group >= expected:
            self._held[group] = record.position

    def _take_position(self, line: int, record: GroupDispatched) -> None:
        """Take the prompt of a dispatched group, which must be the first returned one, or else the next new one."""
        position, new = record.position, self._positions.next
        expected = self._returned[0] if self._returned else new
        if position == expected:
            if self._returned:
                self._returned.popleft()
            else:
                self._positions.advance_to(position)
            return
        skipped: list[int] = []
        if position in self._returned:
            skipped = list(islice(self._returned, self._returned.index(position)))
            self._returned = deque(islice(self._returned, len(skipped) + 1, None))
        elif position >= new:
            skipped = list(self._returned)
            self._returned.clear()
        if not self._damages:
            message = f"prompt {position} is dispatched, and {expected} comes next"
            positions = {position, *skipped, *range(new, position)}
            self._add_impossible(line, message, groups=(record.group,), positions=positions)
        for numbers in self._positions.open or [self._damages[-1].positions]:
            numbers.listed.update(skipped)
        if position >= new:
            self._positions.advance_to(position)

    def _left(self, line: int, record: GroupLeft) -> None:
        held = self._held.pop(record.group, None)
        if held != record.position and not (held is None and self._groups.may_be_lost(record.group)):
            message = f"group {record.group} of prompt {record.position} leaves, and is not held"
            positions = {record.position} if held is None else {record.position, held}
            self._add_impossible(line, message, groups=(record.group,), positions=positions)
        if record.reason is LeaveReason.DISCARDED:
            self._returned.append(record.position)

    def _trained(self, line: int, record: TrainGroups) -> None:
        not_held = [
            group
            for group in record.groups
            if self._held.pop(group, None) is None and not self._groups.may_be_lost(group)
        ]
        if not_held:
            self._add_impossible(line, f"batch {record.batch} trains groups that are not held", groups=not_held)
        expected = self._batches.next
        if not self._batches.advance_to(record.batch):
            message = f"batch {record.batch} trains, and {expected} comes next"
            batches = range(expected, record.batch) or (record.batch,)
            self._add_impossible(line, message, groups=record.groups, batches=batches)

    def _add_impossible(
        self,
        line: int,
        message: str,
        *,
        groups: Iterable[int],
        positions: Iterable[int] = (),
        batches: Iterable[int] = (),
    ) -> None:
        """Note a record that cannot follow those before it."""
        damage = Damage(line, line, message, NumberSet(set(batches)), NumberSet(set(groups)), NumberSet(set(positions)))
        self._damages.append(damage)
