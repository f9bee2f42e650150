"""What is dispatched and not yet trained, and which of it the next batch takes: deadline-first.

    dispatch ─► running ──finish──► finished ──take──► trained
                   ├────────────── leave ────────────► filtered, failed
                   └────────────── take ─────────────► discarded          every group leaves exactly once

Before batch b may leave, for every d ≥ b at least |D(d)| - (d - b)·P groups of D(d) must be in it, where D(d) are the
held groups with deadline ≤ d and P is the batch's size. They are taken first, earliest deadline first; the rest of the
batch fills in the order of completion. When a group that must go has not finished, the missed-deadline policy decides.

Groups of one deadline share a bucket. There are at most S + 1 deadlines to come, so that a question about all D(d) looks at
that many counters however much is held.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from qwen35_trainer.pipeline.window import Window


class OnMissedDeadline(StrEnum):
    """What happens when a group that must go has not finished (values of `spec.async.onMissedDeadline`)."""

    WAIT = "Wait"
    """The batch waits for it: the bound holds for every token."""
    MASK_TOKENS = "MaskTokens"
    """The batch goes without it; when it trains later, its tokens older than the bound are left out of the loss."""
    DISCARD = "Discard"
    """The batch goes without it. What cannot train by its deadline leaves, finished or not, and its prompt is dispatched
    again: biased against long answers, for comparison only."""


@dataclass(frozen=True)
class Batch:
    """Groups to train now, and groups that leave without being trained."""

    groups: tuple[int, ...]
    discarded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Blocked:
    """No batch can leave yet. `due` are running groups that it must contain; empty when there is just too little."""

    finished: int
    needed: int
    due: tuple[int, ...] = ()


@dataclass
class _Bucket:
    """Held groups of one deadline. Of the finished ones, with the place of each in the order of completion."""

    deadline: int
    running: dict[int, None] = field(default_factory=dict)
    finished: deque[tuple[int, int]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.running) + len(self.finished)


class Buffer:
    """Groups between dispatch and training. Deterministic: the same calls give the same batches."""

    def __init__(
        self, window: Window, on_missed_deadline: OnMissedDeadline = OnMissedDeadline.WAIT, *, batch: int = 0
    ) -> None:
        """`batch` is the next one: 0, or where an earlier run stopped."""
        self.window = window
        self._policy = on_missed_deadline
        self._held: dict[int, _Bucket] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._deadlines: list[int] = []  # of the buckets, ascending
        self._completions = self._finished = 0
        self._batch, self._published = batch, window.version_of(batch)

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return self._batch

    @property
    def published(self) -> int:
        """The version that every worker has, except workers that joined with older weights and have not caught up."""
        return self._published

    @property
    def held(self) -> int:
        """Groups dispatched and not yet left."""
        return len(self._held)

    @property
    def pending(self) -> tuple[int, ...]:
        """Groups dispatched and not yet left, in order of dispatch."""
        return tuple(self._held)

    @property
    def finished(self) -> int:
        """Groups that a batch could take."""
        return self._finished

    @property
    def counted(self) -> int:
        """Groups that count against the window: held, or trained at the version that replicas have, or a later one."""
        trained = self._batch - self._published * self.window.batches_per_version
        return len(self._held) + trained * self.window.groups_per_batch

    @property
    def room(self) -> int:
        """Groups that may be dispatched now."""
        return self.window.limit - self.counted

    def deadline(self, group: int) -> int:
        """The last batch that may train a held group."""
        return self._held[group].deadline

    def dispatch(self, group: int, version: int) -> None:
        """A group enters. `version`: every replica has at least these weights, so it cannot be born earlier."""
        if self.room < 1:
            raise ValueError(f"group {group} dispatched into a full window ({self.counted} of {self.window.limit})")
        if group in self._held:
            raise ValueError(f"group {group} dispatched twice")
        bucket = self._held[group] = self._bucket(self.window.deadline(version))
        bucket.running[group] = None

    def born(self, group: int, version: int) -> None:
        """The first token of a running group comes from `version`: that sets its deadline. No news of any other."""
        old = self._held.get(group)
        if old is None or group not in old.running:
            return
        deadline = self.window.deadline(version)
        if deadline != old.deadline:
            del old.running[group]
            self._drop_if_empty(old)
            new = self._held[group] = self._bucket(deadline)
            new.running[group] = None

    def finish(self, group: int) -> None:
        """All sequences of the group are complete and scored."""
        bucket = self._held[group]
        if group not in bucket.running:
            raise ValueError(f"group {group} finished twice")
        del bucket.running[group]
        bucket.finished.append((self._completions, group))
        self._completions += 1
        self._finished += 1

    def leave(self, group: int) -> None:
        """A running group leaves without being trained: it has failed, or has nothing to teach."""
        bucket = self._held[group]
        if group not in bucket.running:
            raise ValueError(f"group {group} has finished: it leaves with a batch")
        del self._held[group], bucket.running[group]
        self._drop_if_empty(bucket)

    def publish(self, version: int) -> None:
        """Every replica has `version`: what trained before it counts no longer.

        The next batch may be training already while its predecessors' weights travel; it goes on counting.
        """
        # Rounded up: the last version of a run may be cut short.
        if not self._published < version <= -(-self._batch // self.window.batches_per_version):
            raise ValueError(f"version {version} published after {self._published}, with {self._batch} batches trained")
        self._published = version

    def missing(self) -> Blocked:
        """What the next batch waits for."""
        _, due = self._required()
        waited_for = () if due is None or self._policy is not OnMissedDeadline.WAIT else self._running_until(due)
        return Blocked(self.finished, self.window.groups_per_batch, tuple(waited_for))

    def take(self) -> Batch | None:
        """The next batch, which thereby leaves the buffer; None when there is none yet, and `missing` says why.

        Asked after every event, so it does not look for what a batch waits for.
        """
        size = self.window.groups_per_batch
        if self._finished < size:
            return None
        required, due = self._required()
        if due is not None and self._policy is OnMissedDeadline.WAIT:
            return None
        groups = [*self._earliest_deadlines(required), *self._earliest_completions(size - required)]
        for group in groups:
            del self._held[group]
        self._finished -= size
        self._batch += 1
        for deadline in tuple(self._deadlines):
            self._drop_if_empty(self._buckets[deadline])
        return Batch(tuple(groups), self._missed() if self._policy is OnMissedDeadline.DISCARD else ())

    def excess(self) -> int:
        """By how much the claim of docs/design/staleness.md fails: max over d of |D(d)| - (d - b + 1)·P, or 0."""
        nested, worst = 0, 0
        for deadline in self._deadlines:
            nested += len(self._buckets[deadline])
            worst = max(worst, nested - (deadline - self._batch + 1) * self.window.groups_per_batch)
        return worst

    def _required(self) -> tuple[int, int | None]:
        """How many finished groups the batch must contain, counted in the order of deadlines, and the first deadline of
        which it must contain groups that still run.
        """
        size, required, held, finished = self.window.groups_per_batch, 0, 0, 0
        due: int | None = None
        for deadline in self._deadlines:
            bucket = self._buckets[deadline]
            finished += len(bucket.finished)
            # What runs past its deadline can no longer be required: it is masked, or it has left.
            held += len(bucket) if deadline >= self._batch else len(bucket.finished)
            needed = min(held - (max(deadline, self._batch) - self._batch) * size, size)
            if needed > finished and due is None:
                due = deadline
            required = max(required, min(needed, finished))
        return required, due

    def _running_until(self, deadline: int) -> Iterator[int]:
        """Running groups whose deadline is that one or an earlier one to come."""
        for each in self._deadlines[bisect_left(self._deadlines, self._batch) :]:
            if each <= deadline:
                yield from self._buckets[each].running

    def _earliest_deadlines(self, count: int) -> Iterator[int]:
        for deadline in self._deadlines:
            finished = self._buckets[deadline].finished
            while count and finished:
                count -= 1
                yield finished.popleft()[1]

    def _earliest_completions(self, count: int) -> Iterator[int]:
        buckets = [(bucket.finished[0], bucket.deadline) for bucket in self._buckets.values() if bucket.finished]
        heapq.heapify(buckets)
        for _ in range(count):
            (_, group), deadline = buckets[0]
            finished = self._buckets[deadline].finished
            finished.popleft()
            if finished:
                heapq.heapreplace(buckets, (finished[0], deadline))
            else:
                heapq.heappop(buckets)
            yield group

    def _missed(self) -> tuple[int, ...]:
        """Take out what cannot train any more, in order of deadlines."""
        missed: list[int] = []
        while self._deadlines and self._deadlines[0] < self._batch:
            bucket = self._buckets.pop(self._deadlines.pop(0))
            self._finished -= len(bucket.finished)
            missed += [*bucket.running, *(group for _, group in bucket.finished)]
        for group in missed:
            del self._held[group]
        return tuple(missed)

    def _bucket(self, deadline: int) -> _Bucket:
        if deadline not in self._buckets:
            self._buckets[deadline] = _Bucket(deadline)
            insort(self._deadlines, deadline)
        return self._buckets[deadline]

    def _drop_if_empty(self, bucket: _Bucket) -> None:
        if not bucket:
            del self._buckets[bucket.deadline]
            self._deadlines.remove(bucket.deadline)
