"""Computes the scheduling state that a journal's records lead to, and checks that no record is missing.

    GroupDispatched ─► held ──TrainGroups─────────────────────► trained
                        ├─────GroupLeft: filtered, failed────► left for good
                        └─────GroupLeft: discarded───────────► returned ─► GroupDispatched again, as another group

Groups, batches and new prompts are numbered without gaps. Returned prompts are dispatched before new ones, in the order
of their return. A record that violates one of these rules raises JournalDamaged, because it shows that other records
are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.pipeline.commands import SchedulingSnapshot, TrainGroups
from qwen35_trainer.pipeline.notices import GroupDispatched, GroupLeft, LeaveReason


class JournalDamaged(RuntimeError):
    """The journal is damaged, so it does not determine where the run continues.

    The message names the first damaged line and the remedy.
    """

    failure = FailureReason.JOURNAL_DAMAGED

    def __init__(self, line: int, problem: str) -> None:
        """Create the error.

        line: number of the damaged line, counted from 1; one more than the number of lines if records are missing at
        the end. problem: description of the damage.
        """
        self.line, self.problem = line, problem
        super().__init__(
            f"line {line} of the journal: {problem}. The journal does not tell which prompts have trained. "
            "Continue with --resume auto: the newest checkpoint has its own position, and the batches after it train again."
        )


class Replay:
    """Computes the scheduling state from the records of a journal, by the same rules as the coordinator."""

    def __init__(self, start: SchedulingSnapshot, held: Sequence[int] = ()) -> None:
        """Begin at the scheduling state `start`, before any record is applied.

        held: the groups that were in the pipeline. Their prompts come first in `start.pending`, in the same order.
        """
        self._batch, self._position, self._group = start.batch, start.position, start.group
        self._held = dict(zip(held, start.pending, strict=False))  # group → position, in order of dispatch
        self._returned = deque(start.pending[len(held) :])

    @property
    def held(self) -> tuple[int, ...]:
        """The groups that were dispatched and have not left, in order of dispatch."""
        return tuple(self._held)

    @property
    def snapshot(self) -> SchedulingSnapshot:
        """The scheduling state from which a run can continue, after all applied records.

        The prompts of groups in the pipeline come first in `pending`.
        """
        pending = (*self._held.values(), *self._returned)
        return SchedulingSnapshot(self._batch, self._position, pending, self._group)

    def apply(self, line: int, record: GroupDispatched | GroupLeft | TrainGroups) -> None:
        """Apply the next record. Raises JournalDamaged if it contradicts earlier records.

        line: line number of the record in the journal, counted from 1, for the error.
        """
        match record:
            case GroupDispatched():
                problem = self._dispatch(record)
            case GroupLeft():
                problem = self._leave(record)
            case TrainGroups():
                problem = self._train(record)
        if problem is not None:
            raise JournalDamaged(line, problem)

    def _dispatch(self, record: GroupDispatched) -> str | None:
        """Dispatch the group of a record, or return the problem if the record cannot follow the earlier ones.

        The group must have the next number. Its prompt must be the first returned prompt, or the next new prompt if no
        returned prompt waits.
        """
        if record.group != self._group:
            return f"group {record.group} is dispatched, and {self._group} comes next"
        expected = self._returned[0] if self._returned else self._position
        if record.position != expected:
            return f"prompt {record.position} is dispatched, and {expected} comes next"
        if self._returned:
            self._returned.popleft()
        else:
            self._position += 1
        self._held[record.group] = record.position
        self._group += 1
        return None

    def _leave(self, record: GroupLeft) -> str | None:
        if self._held.pop(record.group, None) != record.position:
            return f"group {record.group} of prompt {record.position} leaves, and is not held"
        if record.reason is LeaveReason.DISCARDED:
            self._returned.append(record.position)
        return None

    def _train(self, record: TrainGroups) -> str | None:
        if record.batch != self._batch:
            return f"batch {record.batch} trains, and {self._batch} comes next"
        not_held = [group for group in record.groups if self._held.pop(group, None) is None]
        if not_held:
            return f"batch {record.batch} trains groups that are not held: {', '.join(map(str, not_held))}"
        self._batch += 1
        return None
