"""The rollout replicas as the coordinator sees them: which have a free slot, and which sequences each holds.

The rollout pool and the straggler lane are one `ReplicaPool` each. A heap finds the replica with the lowest load. Every change
pushes a new entry, and outdated entries are dropped when they reach the top, so a choice costs O(log replicas).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from qwen35_trainer.pipeline.events import SequenceId


@dataclass(slots=True)
class ReplicaState:
    """The scheduler's knowledge of one rollout replica."""

    number: int
    slots: int
    version: int
    lane: bool
    leaving: bool = False
    sequences: dict[SequenceId, None] = field(default_factory=dict)
    """The sequences that it holds, in order of arrival."""

    @property
    def free_slots(self) -> int:
        return 0 if self.leaving else self.slots - len(self.sequences)


class ReplicaPool:
    """A collection of replicas, ordered by load: those of the pool, those of the lane, or those that have to catch up."""

    def __init__(self) -> None:
        self._replicas: dict[int, ReplicaState] = {}
        self._heap: list[tuple[float, int]] = []  # (load, number)
        self._current_loads: dict[int, float] = {}  # number → load of its current entry in the heap
        self.sequence_count = 0
        """Sequences on all of them."""

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, number: int) -> bool:
        return number in self._replicas

    def __getitem__(self, number: int) -> ReplicaState:
        return self._replicas[number]

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._replicas.values())

    def add(self, replica: ReplicaState) -> None:
        self._replicas[replica.number] = replica
        self._update_heap(replica)

    def set_leaving(self, number: int, leaving: bool) -> None:
        """Mark a replica as leaving, or take that back. A leaving replica has no free slots."""
        replica = self._replicas[number]
        if replica.leaving != leaving:
            replica.leaving = leaving
            self._update_heap(replica)

    def remove(self, number: int) -> ReplicaState:
        """Take a replica out, with the sequences that it holds."""
        replica = self._replicas.pop(number)
        self._current_loads.pop(number, None)
        self.sequence_count -= len(replica.sequences)
        return replica

    def least_loaded(self) -> ReplicaState | None:
        """Return the replica with the smallest share of its slots taken. None if no slot is free."""
        while self._heap:
            load, number = self._heap[0]
            if self._current_loads.get(number) == load:
                return self._replicas[number]
            heapq.heappop(self._heap)
        return None

    def add_sequence(self, replica: ReplicaState, sequence: SequenceId) -> None:
        replica.sequences[sequence] = None
        self.sequence_count += 1
        self._update_heap(replica)

    def remove_sequence(self, number: int, sequence: SequenceId) -> None:
        replica = self._replicas[number]
        del replica.sequences[sequence]
        self.sequence_count -= 1
        self._update_heap(replica)

    def _update_heap(self, replica: ReplicaState) -> None:
        """Push a new entry for a replica whose load has changed, or none if it has no free slot."""
        if replica.free_slots < 1:
            self._current_loads.pop(replica.number, None)
            return
        load = len(replica.sequences) / replica.slots
        if self._current_loads.get(replica.number) != load:
            self._current_loads[replica.number] = load
            heapq.heappush(self._heap, (load, replica.number))
            if len(self._heap) > 64 + 8 * len(self._replicas):
                self._heap = [(load, number) for number, load in self._current_loads.items()]
                heapq.heapify(self._heap)
