"""The rollout workers as the coordinator sees them: who has a free slot, and who holds what.

Pool and lane are two of these. The least-loaded worker comes from a heap whose entries are renewed at every change and
thrown away when they come up outdated, so that a choice costs the logarithm of the number of workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from qwen35_trainer.pipeline.events import SequenceId


@dataclass(slots=True)
class Worker:
    """One rollout worker."""

    number: int
    slots: int
    version: int
    lane: bool
    leaving: bool = False
    sequences: dict[SequenceId, None] = field(default_factory=dict)
    """What it holds, in the order in which it came."""

    @property
    def free(self) -> int:
        return 0 if self.leaving else self.slots - len(self.sequences)


class Workers:
    """The workers of the pool, or of the lane."""

    def __init__(self) -> None:
        self._all: dict[int, Worker] = {}
        self._heap: list[tuple[float, int]] = []  # (load, number)
        self._listed: dict[int, float] = {}  # the load of the entry that counts
        self.held = 0
        """Sequences on all of them."""

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def __getitem__(self, number: int) -> Worker:
        return self._all[number]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all.values())

    def join(self, worker: Worker) -> None:
        self._all[worker.number] = worker
        self._list(worker)

    def leave(self, number: int, leaving: bool) -> None:
        worker = self._all[number]
        if worker.leaving != leaving:
            worker.leaving = leaving
            self._list(worker)

    def lose(self, number: int) -> Worker:
        """Take a worker out, with what it holds."""
        worker = self._all.pop(number)
        self._listed.pop(number, None)
        self.held -= len(worker.sequences)
        return worker

    def least_loaded(self) -> Worker | None:
        """The worker with the smallest share of its slots taken, and one free; None when all are full."""
        while self._heap:
            load, number = self._heap[0]
            if self._listed.get(number) == load:
                return self._all[number]
            heapq.heappop(self._heap)
        return None

    def put(self, worker: Worker, sequence: SequenceId) -> None:
        worker.sequences[sequence] = None
        self.held += 1
        self._list(worker)

    def remove(self, number: int, sequence: SequenceId) -> None:
        worker = self._all[number]
        del worker.sequences[sequence]
        self.held -= 1
        self._list(worker)

    def _list(self, worker: Worker) -> None:
        if worker.free < 1:
            self._listed.pop(worker.number, None)
            return
        load = len(worker.sequences) / worker.slots
        if self._listed.get(worker.number) != load:
            self._listed[worker.number] = load
            heapq.heappush(self._heap, (load, worker.number))
            if len(self._heap) > 64 + 8 * len(self._all):
                self._heap = [(load, number) for number, load in self._listed.items()]
                heapq.heapify(self._heap)
