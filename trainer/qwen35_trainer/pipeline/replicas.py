"""The rollout replicas as the coordinator sees them: which may take a sequence, and which sequences each holds.

A `ReplicaPool` balances load: it finds the replica with the lowest load in a heap. Before a choice, each replica that has
changed since the last choice gets a new entry, and outdated entries are dropped when they reach the top. With n replicas, a
choice costs amortised O(log n), and as much for each replica that has changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.replica_times import UNMEASURED, ReplicaTimes

LENGTH_CHANGE = 0.1
"""Relative change of the expected response length above which the loads of all replicas are computed again."""


@dataclass(slots=True)
class ReplicaState:
    """State of one rollout replica as the coordinator knows it."""

    number: int
    slots: int
    version: int
    lane: bool
    token_room: int | None = None
    """Number of tokens that the replica's memory holds for all its sequences together. None: unknown."""
    leaving: bool = False
    doubted: bool = False
    """Whether it has refused sequences, and it is not known yet whether other replicas can generate them."""
    times: ReplicaTimes = UNMEASURED
    """The measured times of the replica."""
    sequences: dict[SequenceId, None] = field(default_factory=dict)
    """The sequences that the replica holds, in order of arrival."""
    tokens: int = 0
    """Number of response tokens of all sequences that the replica holds."""

    @property
    def is_closed(self) -> bool:
        """Whether the replica may take no sequence, whatever room it has, because it is leaving or doubted."""
        return self.leaving or self.doubted

    @property
    def is_open(self) -> bool:
        """Whether the replica may take one more sequence: it is not closed, and has a free slot and memory for tokens.

        The memory of a replica without sequences is always sufficient.
        """
        if self.is_closed or len(self.sequences) >= self.slots:
            return False
        return self.token_room is None or self.tokens < self.token_room or not self.sequences

    def load(self, expected_tokens: float) -> float:
        """Return the fraction of slots, or of memory for tokens, that the replica's sequences need: the larger of the two.

        If the size of the memory is unknown, only slots count. Each sequence needs memory for its present tokens and for
        `expected_tokens` future tokens. This estimate is unbiased if response lengths are exponentially distributed,
        because then the remaining length does not depend on the present length.
        """
        count = len(self.sequences)
        if self.token_room is None:
            return count / self.slots
        return max(count / self.slots, (self.tokens + count * expected_tokens) / self.token_room)


class ReplicaPool:
    """A collection of replicas from which the least loaded can be chosen.

    The rollout pool and the straggler lane each have a collection. A third collection holds the replicas that must first
    load the published weights.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, ReplicaState] = {}
        self._heap: list[tuple[float, int]] = []  # (load, number)
        self._current_loads: dict[int, float] = {}  # number → load of its current entry in the heap
        self._changed: dict[int, ReplicaState] = {}  # by number: replicas that may need a new entry
        self._expected_tokens = 0.0
        self.sequence_count = 0
        """Number of sequences on all replicas of the collection."""

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, number: object) -> bool:
        return number in self._replicas

    def __getitem__(self, number: int) -> ReplicaState:
        return self._replicas[number]

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._replicas.values())

    def get(self, number: int | None) -> ReplicaState | None:
        """Return the replica `number`, or None if it is not in this collection or `number` is None."""
        return None if number is None else self._replicas.get(number)

    def add(self, replica: ReplicaState) -> None:
        self._replicas[replica.number] = self._changed[replica.number] = replica

    def set_leaving(self, number: int, leaving: bool) -> None:
        """Mark a replica as leaving or not leaving. A leaving replica takes no sequences."""
        replica = self._replicas[number]
        if replica.leaving != leaving:
            replica.leaving = leaving
            self._changed[number] = replica

    def set_doubted(self, number: int, doubted: bool) -> None:
        """Mark a replica as doubted or not doubted. A doubted replica takes no sequences."""
        replica = self._replicas[number]
        if replica.doubted != doubted:
            replica.doubted = doubted
            self._changed[number] = replica

    def expect(self, tokens: float) -> None:
        """Set the number of tokens that every sequence is expected to gain, and update all loads.

        A relative change of at most LENGTH_CHANGE is ignored.
        """
        if abs(tokens - self._expected_tokens) > LENGTH_CHANGE * self._expected_tokens:
            self._expected_tokens = tokens
            self._changed |= self._replicas

    def remove(self, number: int) -> ReplicaState:
        """Remove a replica and return it, with the sequences that it holds."""
        replica = self._replicas.pop(number)
        self._current_loads.pop(number, None)
        self._changed.pop(number, None)
        self.sequence_count -= len(replica.sequences)
        return replica

    def least_loaded(self) -> ReplicaState | None:
        """Return the replica with the lowest load among those that may take a sequence, or None if no replica may."""
        for replica in self._changed.values():
            self._update_heap(replica)
        self._changed.clear()
        while self._heap:
            load, number = self._heap[0]
            if self._current_loads.get(number) == load:
                return self._replicas[number]
            heapq.heappop(self._heap)
        return None

    def add_sequence(self, replica: ReplicaState, sequence: SequenceId, tokens: int) -> None:
        """Assign a sequence that has `tokens` response tokens to a replica."""
        replica.sequences[sequence] = None
        replica.tokens += tokens
        self.sequence_count += 1
        self._changed[replica.number] = replica

    def remove_sequence(self, number: int, sequence: SequenceId, tokens: int) -> None:
        """Remove a sequence that has `tokens` response tokens from its replica."""
        replica = self._replicas[number]
        del replica.sequences[sequence]
        replica.tokens -= tokens
        self.sequence_count -= 1
        self._changed[number] = replica

    def grow(self, number: int, tokens: int) -> None:
        """Record that the sequences of a replica have gained `tokens` response tokens, all together."""
        replica = self._replicas[number]
        replica.tokens += tokens
        if replica.token_room is not None:
            self._changed[number] = replica

    def _update_heap(self, replica: ReplicaState) -> None:
        """Push a heap entry for a replica whose load has changed. Invalidate its entry if it may take no sequence."""
        if not replica.is_open:
            self._current_loads.pop(replica.number, None)
            return
        load = replica.load(self._expected_tokens)
        if self._current_loads.get(replica.number) != load:
            self._current_loads[replica.number] = load
            heapq.heappush(self._heap, (load, replica.number))
            if len(self._heap) > 64 + 8 * len(self._replicas):
                self._heap = [(load, number) for number, load in self._current_loads.items()]
                heapq.heapify(self._heap)
