"""Places sequences: the queue, the replicas of the rollout pool, and the straggler lane.

    add ─► queue ──place──► replica of the pool ──SequenceFinished──► done
             ▲                 │        │
             └── lost ◄────────┤        └── past afterTokens: move_stragglers ─► replica of the lane ──SequenceFinished──► done
                               └── drop: its group left

The queue is ordered by birth, the lane's by deadline, earliest first. Events about groups that have left are ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.replicas import ReplicaPool, ReplicaState

EVALUATION_POSITION = -1
"""The position of an evaluation's group, which never enters the window."""
EVALUATION_PRIORITY = -1
"""Before every version and every batch: a publication waits for the evaluation, so its sequences go first."""


@dataclass(slots=True)
class PlacedSequence:
    """One sequence of a group: its replica, its tokens so far, and the version of its first token."""

    tokens: int = 0
    born: int | None = None
    """The version of its first token, or an older one that bounds it."""
    replica: int | None = None
    done: bool = False


@dataclass(slots=True)
class PlacedGroup:
    """The sequences that are sampled for one prompt, and where they are."""

    position: int
    sequences: list[PlacedSequence]
    unfinished: int

    @property
    def is_evaluation(self) -> bool:
        return self.position == EVALUATION_POSITION


class Placement:
    """Groups from dispatch to their end, and the replicas that they run on. Reports births of groups to `buffer`."""

    def __init__(self, buffer: Buffer, lane_after: int | None) -> None:
        self.groups: dict[int, PlacedGroup] = {}
        self.pool, self.lane = ReplicaPool(), ReplicaPool()
        self.behind = ReplicaPool()
        """Replicas that joined with older weights than the published ones. They get no sequences until they caught up."""
        self._buffer, self._lane_after = buffer, lane_after
        self._queue: list[tuple[int, int, int]] = []  # (birth, group, index) without a replica
        self._stragglers: list[tuple[int, int, int]] = []  # (deadline, group, index) waiting for the lane

    @property
    def running(self) -> int:
        """The number of sequences on replicas."""
        return self.pool.sequence_count + self.lane.sequence_count

    @property
    def waiting(self) -> int:
        """The number of sequences without a replica."""
        return len(self._queue)

    def add(self, number: int, position: int, samples: int) -> None:
        """Enqueue the sequences of a new group."""
        self.groups[number] = PlacedGroup(position, [PlacedSequence() for _ in range(samples)], samples)
        for index in range(samples):
            self._enqueue((number, index))

    def drop(self, numbers: Iterable[int], actions: list[do.Action]) -> None:
        """Cancel the sequences of groups. The groups remain in `groups` until the caller takes them out."""
        cancelled: dict[int, list[SequenceId]] = {}
        for number in numbers:
            for index, sequence in enumerate(self.groups[number].sequences):
                if sequence.replica is not None:
                    self.pool_of(sequence.replica).remove_sequence(sequence.replica, (number, index))
                    cancelled.setdefault(sequence.replica, []).append((number, index))
                    sequence.replica = None
        actions += [do.CancelSequences(replica, tuple(names)) for replica, names in cancelled.items()]

    # Replicas.

    def pool_of(self, number: int) -> ReplicaPool:
        """Return the collection that holds a replica: the lane, the replicas that still load newer weights, or the pool."""
        return next((pool for pool in (self.lane, self.behind) if number in pool), self.pool)

    def join(self, event: on.ReplicaJoined) -> bool:
        """Add a replica. Returns whether it may work now; if not, it is behind. Raises ValueError if it has joined already."""
        if any(event.replica in pool for pool in (self.pool, self.lane, self.behind)):
            raise ValueError(f"replica {event.replica} joins twice")
        self.behind.add(ReplicaState(event.replica, event.slots, event.version, event.lane))
        return self.catch_up(event.replica, event.version)

    def catch_up(self, number: int, version: int) -> bool:
        """Note that a replica that was behind has loaded `version`. Returns whether it may work now."""
        if version < self._buffer.published:
            return False
        replica = self.behind.remove(number)
        replica.version = version
        (self.lane if replica.lane else self.pool).add(replica)
        return True

    def set_leaving(self, event: on.ReplicaLeaving) -> None:
        """Mark a replica as leaving, or take that back."""
        self.pool_of(event.replica).set_leaving(event.replica, event.leaving)

    def lose(self, event: on.ReplicaLost, *, keep: bool) -> ReplicaState:
        """Remove a lost replica and enqueue its sequences, with their available tokens if `keep`."""
        replica = self.pool_of(event.replica).remove(event.replica)
        for name in replica.sequences:
            sequence = self.groups[name[0]].sequences[name[1]]
            sequence.replica = None
            sequence.tokens = event.kept.get(name, 0) if keep else 0
            if sequence.tokens == 0:
                sequence.born = None
            self._enqueue(name)
            self._report_birth(name[0])
        return replica

    # Sequences.

    def started(self, event: on.SequenceStarted) -> None:
        """Note the version of a sequence's first token."""
        group = self.groups.get(event.sequence[0])
        if group is None:
            return
        sequence = group.sequences[event.sequence[1]]
        if sequence.born is None or (sequence.born < event.version and sequence.tokens == 0):
            sequence.born = event.version
            self._report_birth(event.sequence[0])

    def progressed(self, event: on.SequencesProgressed) -> None:
        """Note the tokens of running sequences. Sequences that have become stragglers wait for a slot of the lane."""
        for name, tokens in event.tokens.items():
            group = self.groups.get(name[0])
            if group is None or group.sequences[name[1]].done:
                continue
            sequence = group.sequences[name[1]]
            was_straggler = self._is_straggler(sequence)
            sequence.tokens = max(sequence.tokens, tokens)
            if self._is_straggler(sequence) and not was_straggler:
                self._enqueue_for_lane(name)

    def finished(self, event: on.SequenceFinished) -> bool:
        """Note that a sequence is complete. Returns whether its group is complete now."""
        group = self.groups.get(event.sequence[0])
        if group is None or group.sequences[event.sequence[1]].done:
            return False
        sequence = group.sequences[event.sequence[1]]
        if sequence.replica is not None:
            self.pool_of(sequence.replica).remove_sequence(sequence.replica, event.sequence)
        sequence.replica, sequence.tokens, sequence.done = None, event.tokens, True
        group.unfinished -= 1
        return group.unfinished == 0

    # Slots.

    def move_stragglers(self, actions: list[do.Action]) -> None:
        """Move stragglers to the lane while it has free slots."""
        while self._stragglers and (target := self.lane.least_loaded()) is not None:
            _, number, index = heapq.heappop(self._stragglers)
            group = self.groups.get(number)
            sequence = None if group is None else group.sequences[index]
            if sequence is None or sequence.replica is None or sequence.replica in self.lane:
                continue  # it has finished, or waits for another replica
            if not self._is_straggler(sequence):
                continue  # it started over
            self.pool.remove_sequence(sequence.replica, (number, index))
            self.lane.add_sequence(target, (number, index))
            actions.append(do.MoveSequence((number, index), sequence.replica, target.number))
            sequence.replica = target.number
            self._update_birth(number, sequence, target)

    def place(self, actions: list[do.Action], dispatch: Callable[[list[do.Action]], bool]) -> None:
        """Assign waiting sequences to free slots, and add new groups while slots are free and nothing waits.

        dispatch: adds a group if one may enter, and returns whether it did.
        """
        starts: dict[int, list[tuple[SequenceId, int]]] = {}
        while self._queue or (self.pool.least_loaded() is not None and dispatch(actions)):
            _, number, index = self._queue[0]
            group = self.groups.get(number)
            if group is None or group.sequences[index].done or group.sequences[index].replica is not None:
                heapq.heappop(self._queue)  # the entry is outdated
                continue
            sequence = group.sequences[index]
            replica = self._replica_for(sequence)
            if replica is None:
                break
            heapq.heappop(self._queue)
            self.pool_of(replica.number).add_sequence(replica, (number, index))
            sequence.replica = replica.number
            if self._is_straggler(sequence) and not replica.lane:
                self._enqueue_for_lane((number, index))
            self._update_birth(number, sequence, replica)
            starts.setdefault(replica.number, []).append(((number, index), sequence.tokens))
        actions += [do.StartSequences(replica, tuple(names)) for replica, names in starts.items()]

    def _replica_for(self, sequence: PlacedSequence) -> ReplicaState | None:
        """Return the least loaded replica with a free slot; None if no slot is free.

        A straggler gets a replica of the lane, or one of the pool if the lane has no free slot. Other sequences get a
        replica of the pool. While the pool has no replica, all sequences get one of the lane.
        """
        uses_lane = self._is_straggler(sequence) or not len(self.pool)
        return (self.lane.least_loaded() if uses_lane else None) or self.pool.least_loaded()

    def _is_straggler(self, sequence: PlacedSequence) -> bool:
        return self._lane_after is not None and sequence.tokens >= self._lane_after

    def _update_birth(self, number: int, sequence: PlacedSequence, replica: ReplicaState) -> None:
        """Lower the birth of a sequence to the version of the replica that generates its next token.

        While a version is in transfer, the replica's version can be older than the one that generated the last token.
        """
        born_before = None if sequence.tokens == 0 else sequence.born
        born = replica.version if born_before is None else min(born_before, replica.version)
        if born != sequence.born:
            sequence.born = born
            self._report_birth(number)

    def _report_birth(self, number: int) -> None:
        """Tell the buffer the version of the group's oldest token.

        If no sequence has a version yet, report the published version, because no later token can be older.
        """
        group = self.groups[number]
        if not group.is_evaluation:
            born = [sequence.born for sequence in group.sequences if sequence.born is not None]
            self._buffer.born(number, min(born, default=self._buffer.published))

    def _enqueue_for_lane(self, name: SequenceId) -> None:
        is_evaluation = self.groups[name[0]].is_evaluation
        priority = EVALUATION_PRIORITY if is_evaluation else self._buffer.deadline(name[0])
        heapq.heappush(self._stragglers, (priority, *name))

    def _enqueue(self, name: SequenceId) -> None:
        group = self.groups[name[0]]
        born = EVALUATION_PRIORITY if group.is_evaluation else group.sequences[name[1]].born
        heapq.heappush(self._queue, (self._buffer.published if born is None else born, *name))
