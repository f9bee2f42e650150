"""The groups between dispatch and training, and the choice of the next batch among them: earliest deadline first.

    dispatch ─► running ──finish──► finished ──take──► trained
                   │                    └──────take──► discarded
                   ├────────────── take ─────────────► discarded
                   └────────────── leave ────────────► filtered, failed          every group leaves exactly once

The deadline of a group is the last batch that may train the group. Let b be the next batch, P the number of groups per
batch, and D(d) the set of groups in the buffer with deadline ≤ d, without those that still run after their deadline.
Batches b + 1 … d can take (d - b)·P groups. For every d ≥ b, batch b must therefore contain at least |D(d)| - (d - b)·P
groups of D(d): those with the earliest deadlines. They are called due. A batch takes the due groups first, and then
other groups in order of completion. If a due group has not finished, the missed-deadline policy decides.

Groups with the same deadline share a cohort. The cost of choosing a batch depends on the number of cohorts, not on the
number of groups. With a maximum lag of S versions, at most S + 1 deadlines are b or later. Only policy MaskTokens keeps
groups after their deadline, and has more cohorts for that reason.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from qwen35_trainer.pipeline.window import Window


class MissedDeadlinePolicy(StrEnum):
    """Policies for an unfinished group that the next batch must contain: `spec.async.onMissedDeadline`."""

    WAIT = "Wait"
    """The batch waits until the group has finished.

    All tokens of the group then train, and none of them has a lag above the maximum lag.
    """
    MASK_TOKENS = "MaskTokens"
    """The batch trains without the unfinished group.

    A later batch trains the group. Tokens whose lag then exceeds the maximum lag are masked out of the loss.
    """
    DISCARD = "Discard"
    """The batch trains without the unfinished group.

    All groups that no later batch may train leave untrained together with the batch, finished or not. Their prompts are
    dispatched again. This policy is biased against long responses; use it for comparison only.
    """


@dataclass(frozen=True)
class Batch:
    """The groups of the next batch, and the groups that leave untrained because they missed their deadline.

    groups: numbers of the groups to train. discarded: numbers of the groups that leave untrained; always empty unless
    the policy is Discard.
    """

    groups: tuple[int, ...]
    discarded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Blocked:
    """The reason why the next batch is not complete.

    finished: number of groups that have finished. needed: number of groups per batch. due: unfinished groups, at least
    one of which must finish before the batch is complete; empty if the only reason is that `finished` < `needed`.
    """

    finished: int
    needed: int
    due: tuple[int, ...] = ()


@dataclass
class _Cohort:
    """The groups in the buffer that have the same deadline."""

    deadline: int
    running: dict[int, None] = field(default_factory=dict)
    finished: deque[tuple[int, int]] = field(default_factory=deque)
    """Finished groups in order of completion, each as (number of the completion, group).

    Completions are counted over all groups of the buffer.
    """

    def __len__(self) -> int:
        return len(self.running) + len(self.finished)


class Buffer:
    """Holds the groups between dispatch and training, and chooses the next batch.

    The buffer is deterministic: the same sequence of calls always gives the same batches.
    """

    def __init__(
        self, window: Window, on_missed_deadline: MissedDeadlinePolicy = MissedDeadlinePolicy.WAIT, *, batch: int = 0
    ) -> None:
        """Create an empty buffer.

        window: the limits on the number and the age of groups. on_missed_deadline: what happens if the next batch must
        contain a group that has not finished. batch: number of the next batch; above 0 if the run continues from a
        checkpoint.
        """
        self.window = window
        self._policy = on_missed_deadline
        self._held: dict[int, _Cohort] = {}
        self._cohorts: dict[int, _Cohort] = {}
        self._deadlines: list[int] = []  # of the cohorts, ascending
        self._completions = self._finished = 0
        self._batch, self._published = batch, window.version_of(batch)

    @property
    def batch(self) -> int:
        """The number of the next batch."""
        return self._batch

    @property
    def published(self) -> int:
        """The newest version that every replica has loaded.

        Replicas that joined late and still catch up do not count.
        """
        return self._published

    @property
    def held(self) -> int:
        """The number of groups in the buffer. A group enters the buffer at its dispatch."""
        return len(self._held)

    @property
    def pending(self) -> tuple[int, ...]:
        """The numbers of the groups in the buffer, in order of dispatch."""
        return tuple(self._held)

    @property
    def finished(self) -> int:
        """The number of groups in the buffer that have finished, so that a batch can take them."""
        return self._finished

    @property
    def counted(self) -> int:
        """The number of groups that count against the window, which limits how far generation runs ahead of training.

        All groups in the buffer count. A group that a batch has taken counts until every replica has loaded weights
        that were trained with the group.
        """
        trained = self._batch - self._published * self.window.batches_per_version
        return len(self._held) + trained * self.window.groups_per_batch

    @property
    def room(self) -> int:
        """The number of groups that may be dispatched now: the window's limit minus `counted`."""
        return self.window.limit - self.counted

    def deadline(self, group: int) -> int:
        """Return the number of the last batch that may train a group.

        Raises KeyError if the group is not in the buffer.
        """
        return self._held[group].deadline

    def dispatch(self, group: int, version: int) -> None:
        """Add a group whose generation begins.

        version: the published version. No token of the group will come from an older version, so `version` determines
        the deadline until `born` is called. Raises ValueError if the window is full or the group is already in the
        buffer.
        """
        if self.room < 1:
            raise ValueError(f"group {group} dispatched into a full window ({self.counted} of {self.window.limit})")
        if group in self._held:
            raise ValueError(f"group {group} dispatched twice")
        cohort = self._held[group] = self._cohort(self.window.deadline(version))
        cohort.running[group] = None

    def born(self, group: int, version: int) -> None:
        """Set the deadline of an unfinished group, given the version that generated the group's oldest token.

        Does nothing if the group has finished or left.
        """
        old = self._held.get(group)
        if old is None or group not in old.running:
            return
        deadline = self.window.deadline(version)
        if deadline != old.deadline:
            del old.running[group]
            self._drop_if_empty(old)
            new = self._held[group] = self._cohort(deadline)
            new.running[group] = None

    def finish(self, group: int) -> None:
        """Record that all sequences of a group are complete and scored, so that a batch can take the group.

        Raises ValueError if the group has already finished, and KeyError if it is not in the buffer.
        """
        cohort = self._held[group]
        if group not in cohort.running:
            raise ValueError(f"group {group} finished twice")
        del cohort.running[group]
        cohort.finished.append((self._completions, group))
        self._completions += 1
        self._finished += 1

    def leave(self, group: int) -> None:
        """Remove an unfinished group that will not train, because it failed or all its rewards are equal.

        Raises ValueError if the group has finished, because finished groups leave only with a batch. Raises KeyError if
        the group is not in the buffer.
        """
        cohort = self._held[group]
        if group not in cohort.running:
            raise ValueError(f"group {group} has finished: it leaves with a batch")
        del self._held[group], cohort.running[group]
        self._drop_if_empty(cohort)

    def publish(self, version: int) -> None:
        """Record that every replica has loaded `version`.

        Groups that trained at earlier versions no longer count against the window. Groups that trained at `version` or
        later, while the weights were in transfer, still count. Raises ValueError if `version` is not newer than the
        last published version, or if no batch has been taken that trains at version `version` - 1.
        """
        # Rounded up, because the last version of a run may have fewer batches.
        if not self._published < version <= -(-self._batch // self.window.batches_per_version):
            raise ValueError(f"version {version} published after {self._published}, with {self._batch} batches trained")
        self._published = version

    def missing(self) -> Blocked:
        """Return what the next batch waits for. The result is meaningful only while `take` returns None."""
        _, deadline = self._required()
        due: tuple[int, ...] = ()
        if deadline is not None and self._policy is MissedDeadlinePolicy.WAIT:
            due = tuple(self._running_until(deadline))
        return Blocked(self.finished, self.window.groups_per_batch, due)

    def take(self) -> Batch | None:
        """Return the next batch, and remove its groups (`groups` and `discarded`) from the buffer.

        Returns None, and removes nothing, if the batch is not complete; `missing` then returns the reason. The
        coordinator calls `take` after every event, so `take` must be fast.
        """
        size = self.window.groups_per_batch
        if self._finished < size:
            return None
        required, first_running = self._required()
        if first_running is not None and self._policy is MissedDeadlinePolicy.WAIT:
            return None
        groups = [*self._earliest_deadlines(required), *self._earliest_completions(size - required)]
        for group in groups:
            del self._held[group]
        self._finished -= size
        self._batch += 1
        for deadline in tuple(self._deadlines):
            self._drop_if_empty(self._cohorts[deadline])
        return Batch(tuple(groups), self._take_missed() if self._policy is MissedDeadlinePolicy.DISCARD else ())

    def excess(self) -> int:
        """Return how many groups must miss their deadline even if all groups finish immediately; 0 if none must.

        The result is the maximum over deadlines d of |D(d)| - (d - b + 1)·P, or 0 if that is negative. D(d) is the set
        of groups in the buffer with deadline ≤ d, b is the next batch, and P is the number of groups per batch. Deadlines
        before b - 1 count as b - 1. With policy Wait the result is always 0, which docs/design/staleness.md proves.
        """
        nested, excess = 0, 0
        for deadline in self._deadlines:
            nested += len(self._cohorts[deadline])
            excess = max(excess, nested - max(0, deadline - self._batch + 1) * self.window.groups_per_batch)
        return excess

    def _required(self) -> tuple[int, int | None]:
        """Return how many finished groups the next batch must contain, and for which deadline groups are missing.

        The second value is the smallest d for which the batch must contain more groups with deadline ≤ d than have
        finished. It is None if enough groups have finished for every d.
        """
        size, required, held, finished = self.window.groups_per_batch, 0, 0, 0
        first_running: int | None = None
        for deadline in self._deadlines:
            cohort = self._cohorts[deadline]
            finished += len(cohort.finished)
            # A group that runs past its deadline can no longer be required: it is masked, or it has left.
            held += len(cohort) if deadline >= self._batch else len(cohort.finished)
            needed = min(held - (max(deadline, self._batch) - self._batch) * size, size)
            if needed > finished and first_running is None:
                first_running = deadline
            required = max(required, min(needed, finished))
        return required, first_running

    def _running_until(self, deadline: int) -> Iterator[int]:
        """Yield the unfinished groups whose deadline has not passed and is at most `deadline`."""
        for candidate in self._deadlines[bisect_left(self._deadlines, self._batch) :]:
            if candidate <= deadline:
                yield from self._cohorts[candidate].running

    def _earliest_deadlines(self, count: int) -> Iterator[int]:
        """Remove `count` finished groups from their cohorts, the earliest deadline first, and yield them."""
        for deadline in self._deadlines:
            finished = self._cohorts[deadline].finished
            while count and finished:
                count -= 1
                yield finished.popleft()[1]

    def _earliest_completions(self, count: int) -> Iterator[int]:
        """Remove `count` finished groups from their cohorts, in order of completion, and yield them."""
        cohorts = [(cohort.finished[0], cohort.deadline) for cohort in self._cohorts.values() if cohort.finished]
        heapq.heapify(cohorts)
        for _ in range(count):
            (_, group), deadline = cohorts[0]
            finished = self._cohorts[deadline].finished
            finished.popleft()
            if finished:
                heapq.heapreplace(cohorts, (finished[0], deadline))
            else:
                heapq.heappop(cohorts)
            yield group

    def _take_missed(self) -> tuple[int, ...]:
        """Remove all groups past their deadline, finished or not, and return them in order of deadlines."""
        missed: list[int] = []
        while self._deadlines and self._deadlines[0] < self._batch:
            cohort = self._cohorts.pop(self._deadlines.pop(0))
            self._finished -= len(cohort.finished)
            missed += [*cohort.running, *(group for _, group in cohort.finished)]
        for group in missed:
            del self._held[group]
        return tuple(missed)

    def _cohort(self, deadline: int) -> _Cohort:
        if deadline not in self._cohorts:
            self._cohorts[deadline] = _Cohort(deadline)
            insort(self._deadlines, deadline)
        return self._cohorts[deadline]

    def _drop_if_empty(self, cohort: _Cohort) -> None:
        if not cohort:
            del self._cohorts[cohort.deadline]
            self._deadlines.remove(cohort.deadline)
