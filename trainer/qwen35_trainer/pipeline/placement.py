"""Where sequences run: the queue, the workers of the pool, and the lane for stragglers.

    add ─► queue ──place──► worker of the pool ──Finished──► done
             ▲                 │        │
             └── lost ◄────────┤        └── past afterTokens: hand_over ─► worker of the lane ──Finished──► done
                               └── drop: its group left

The queue gives the earliest birth first, the lane takes the earliest deadline first. An event about a group that has left is ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.actions import Action
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.workers import Worker, Workers

NOT_A_PROMPT = -1
"""The position of an evaluation's group: it never enters the window."""
FIRST = -1
"""Before every version and every batch: an evaluation goes first, since a publication waits for it."""


@dataclass(slots=True)
class Sequence:
    """One sample."""

    tokens: int = 0
    born: int | None = None
    """The version of its first token, or an older one that its worker had for sure."""
    worker: int | None = None
    done: bool = False


@dataclass(slots=True)
class Group:
    """The samples of one prompt."""

    position: int
    sequences: list[Sequence]
    unfinished: int

    @property
    def is_evaluation(self) -> bool:
        return self.position == NOT_A_PROMPT


class Placement:
    """Groups from their dispatch to their end, and the workers that they run on. Tells `buffer` when groups are born."""

    def __init__(self, buffer: Buffer, lane_after: int | None) -> None:
        self.groups: dict[int, Group] = {}
        self.pool, self.lane = Workers(), Workers()
        self.behind = Workers()
        """Joined with older weights than the published ones. They get nothing until they have loaded those."""
        self._buffer, self._lane_after = buffer, lane_after
        self._queue: list[tuple[int, int, int]] = []  # (birth, group, index) without a worker
        self._stragglers: list[tuple[int, int, int]] = []  # (deadline, group, index) that wait for the lane

    @property
    def running(self) -> int:
        """Sequences on workers."""
        return self.pool.held + self.lane.held

    @property
    def waiting(self) -> int:
        """Sequences without a worker."""
        return len(self._queue)

    def add(self, number: int, position: int, samples: int) -> None:
        """A group whose sequences are to be generated."""
        self.groups[number] = Group(position, [Sequence() for _ in range(samples)], samples)
        for index in range(samples):
            self._enqueue((number, index))

    def drop(self, numbers: Iterable[int], actions: list[Action]) -> None:
        """Take groups off their workers. They stay known until they are taken out of `groups`."""
        held: dict[int, list[SequenceId]] = {}
        for number in numbers:
            for index, sequence in enumerate(self.groups[number].sequences):
                if sequence.worker is not None:
                    self.with_worker(sequence.worker).remove(sequence.worker, (number, index))
                    held.setdefault(sequence.worker, []).append((number, index))
                    sequence.worker = None
        actions += [do.Cancel(worker, tuple(names)) for worker, names in held.items()]

    # Workers.

    def with_worker(self, number: int) -> Workers:
        """The collection that holds the worker: the lane, those behind, or the pool."""
        return next((workers for workers in (self.lane, self.behind) if number in workers), self.pool)

    def join(self, event: on.WorkerJoined) -> bool:
        """True if the worker may work now, False if it is behind. Raises ValueError for a worker that is there already."""
        if any(event.worker in workers for workers in (self.pool, self.lane, self.behind)):
            raise ValueError(f"worker {event.worker} joins twice")
        self.behind.join(Worker(event.worker, event.slots, event.version, event.lane))
        return self.caught_up(event.worker, event.version)

    def caught_up(self, number: int, version: int) -> bool:
        """A worker that was behind has loaded `version`. True if it may work now."""
        if version < self._buffer.published:
            return False
        worker = self.behind.lose(number)
        worker.version = version
        (self.lane if worker.lane else self.pool).join(worker)
        return True

    def lose(self, event: on.WorkerLost, *, keep: bool) -> Worker:
        """Its sequences wait for another, with the tokens that are at hand if they may keep them."""
        worker = self.with_worker(event.worker).lose(event.worker)
        for name in worker.sequences:
            sequence = self.groups[name[0]].sequences[name[1]]
            sequence.worker = None
            sequence.tokens = event.kept.get(name, 0) if keep else 0
            if sequence.tokens == 0:
                sequence.born = None
            self._enqueue(name)
            self._birth(name[0])
        return worker

    # Sequences.

    def started(self, event: on.Started) -> None:
        group = self.groups.get(event.sequence[0])
        if group is None:
            return
        sequence = group.sequences[event.sequence[1]]
        if sequence.born is None or (sequence.born < event.version and sequence.tokens == 0):
            sequence.born = event.version
            self._birth(event.sequence[0])

    def progressed(self, event: on.Progressed) -> None:
        for name, tokens in event.tokens.items():
            group = self.groups.get(name[0])
            if group is None or group.sequences[name[1]].done:
                continue
            sequence = group.sequences[name[1]]
            was = self._is_straggler(sequence)
            sequence.tokens = max(sequence.tokens, tokens)
            if self._is_straggler(sequence) and not was:
                self._enlist(name)

    def finished(self, event: on.Finished) -> bool:
        """Whether its group is complete with it."""
        group = self.groups.get(event.sequence[0])
        if group is None or group.sequences[event.sequence[1]].done:
            return False
        sequence = group.sequences[event.sequence[1]]
        if sequence.worker is not None:
            self.with_worker(sequence.worker).remove(sequence.worker, event.sequence)
        sequence.worker, sequence.tokens, sequence.done = None, event.tokens, True
        group.unfinished -= 1
        return group.unfinished == 0

    # Slots.

    def hand_over(self, actions: list[Action]) -> None:
        """Move stragglers to the lane, as long as it has slots."""
        while self._stragglers and (target := self.lane.least_loaded()) is not None:
            _, number, index = heapq.heappop(self._stragglers)
            group = self.groups.get(number)
            sequence = None if group is None else group.sequences[index]
            if sequence is None or sequence.worker is None or sequence.worker in self.lane:
                continue  # it has finished, or waits for another worker
            if not self._is_straggler(sequence):
                continue  # it began anew
            self.pool.remove(sequence.worker, (number, index))
            self.lane.put(target, (number, index))
            actions.append(do.Move((number, index), sequence.worker, target.number))
            sequence.worker = target.number
            self._lands(number, sequence, target)

    def place(self, actions: list[Action], dispatch: Callable[[list[Action]], bool]) -> None:
        """Give free slots to sequences that wait, and to those of a new prompt when none does.

        dispatch: adds a group, if there may be one, and tells whether it did.
        """
        starts: dict[int, list[tuple[SequenceId, int]]] = {}
        while self._queue or (self.pool.least_loaded() is not None and dispatch(actions)):
            _, number, index = self._queue[0]
            group = self.groups.get(number)
            if group is None or group.sequences[index].done or group.sequences[index].worker is not None:
                heapq.heappop(self._queue)  # it has left meanwhile
                continue
            sequence = group.sequences[index]
            worker = self._slot_for(sequence)
            if worker is None:
                break
            heapq.heappop(self._queue)
            self.with_worker(worker.number).put(worker, (number, index))
            sequence.worker = worker.number
            if self._is_straggler(sequence) and not worker.lane:
                self._enlist((number, index))
            self._lands(number, sequence, worker)
            starts.setdefault(worker.number, []).append(((number, index), sequence.tokens))
        actions += [do.Start(worker, tuple(names)) for worker, names in starts.items()]

    def _slot_for(self, sequence: Sequence) -> Worker | None:
        """The lane's for a straggler that lost its worker, and for all when the pool has no worker left."""
        fast = self.lane.least_loaded() if self._is_straggler(sequence) or not len(self.pool) else None
        return fast or self.pool.least_loaded()

    def _is_straggler(self, sequence: Sequence) -> bool:
        return self._lane_after is not None and sequence.tokens >= self._lane_after

    def _lands(self, number: int, sequence: Sequence, worker: Worker) -> None:
        """Its next token comes from the worker's weights. While a version travels they may be older than those of its last."""
        known = None if sequence.tokens == 0 else sequence.born
        born = worker.version if known is None else min(known, worker.version)
        if born != sequence.born:
            sequence.born = born
            self._birth(number)

    def _birth(self, number: int) -> None:
        """Tell the buffer of a group's oldest token. What has no token yet is born at the published version or later."""
        group = self.groups[number]
        if not group.is_evaluation:
            born = [sequence.born for sequence in group.sequences if sequence.born is not None]
            self._buffer.born(number, min(born, default=self._buffer.published))

    def _enlist(self, name: SequenceId) -> None:
        """Among those that wait for the lane."""
        evaluation = self.groups[name[0]].is_evaluation
        heapq.heappush(self._stragglers, (FIRST if evaluation else self._buffer.deadline(name[0]), *name))

    def _enqueue(self, name: SequenceId) -> None:
        group = self.groups[name[0]]
        born = FIRST if group.is_evaluation else group.sequences[name[1]].born
        heapq.heappush(self._queue, (self._buffer.published if born is None else born, *name))
