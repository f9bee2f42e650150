"""The sequences of groups that are generated or wait to train: where each is, and which of them wait for a replica.

    add ──────────────► any replica     in order of priority, the lowest first
    add, with a home ─► one replica     the next free slot there; after `unbind` any replica

The rest of a group that did not fit on a replica waits for that replica, its home, which has computed the prompt already. A
sequence that waits for its home does not wait for long: once its priority is below `before`, the caller's limit, it counts
among those that any replica may take.

Entries of sequences that no longer wait stay in the heaps until they reach the top, or until they outnumber the others.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from qwen35_trainer.pipeline.events import SequenceId

type _Entry = tuple[int, int, int]  # (priority, group, index)

EVALUATION_POSITION = -1
"""The position of an evaluation's group, which never enters the window."""
MIN_OUTDATED_ENTRIES = 64
"""A heap with at most this many outdated entries is not cleaned."""


@dataclass(slots=True)
class PlacedSequence:
    """One sequence of a group: its replica, its tokens so far, and the version of its first token."""

    tokens: int = 0
    tokens_at_start: int = 0
    """The tokens that it was known to have when it was last placed or moved: they are not lost with its replica."""
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
    home: int | None = None
    """The replica to which its sequences without tokens go, so that they share the computation of their prompt."""
    home_room: int = 0
    """The number of sequences that may still go there."""

    @property
    def is_evaluation(self) -> bool:
        return self.position == EVALUATION_POSITION


class WaitingSequences:
    """The sequences that wait for a replica. Each operation takes O(log waiting)."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, tuple[int, int | None]] = {}  # name → (priority, home)
        self._anywhere: list[_Entry] = []
        self._bound: list[_Entry] = []
        self._by_home: dict[int, deque[SequenceId]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: SequenceId, priority: int, home: int | None = None) -> None:
        """Enqueue a sequence. `home`: the replica that it waits for; None: it waits for any."""
        self._waiting[name] = (priority, home)
        if home is None:
            self._push(self._anywhere, (priority, *name))
        else:
            self._push(self._bound, (priority, *name))
            self._by_home.setdefault(home, deque()).append(name)

    def remove(self, name: SequenceId) -> None:
        """Take a sequence out: it has a replica now, or needs none any more."""
        self._waiting.pop(name, None)

    def unbind(self, home: int) -> None:
        """Let the sequences that wait for this replica wait for any."""
        for name in self._by_home.pop(home, ()):
            priority, bound_to = self._waiting.get(name, (0, None))
            if bound_to == home:
                self.add(name, priority)

    def has_bound(self, home: int) -> bool:
        """Whether sequences may wait for this replica."""
        return home in self._by_home

    def first(self, before: int) -> SequenceId | None:
        """Return the sequence with the lowest priority among those that any replica may take. None if there is none.

        before: a sequence with a lower priority than this does not wait for its home.
        """
        anywhere, bound = self._top(self._anywhere, bound=False), self._top(self._bound, bound=True)
        if bound is not None and bound[0] < before and (anywhere is None or bound < anywhere):
            anywhere = bound
        return None if anywhere is None else anywhere[1:]

    def first_bound(self) -> SequenceId | None:
        """Return the sequence with the lowest priority among those that wait for their home. None if there is none."""
        top = self._top(self._bound, bound=True)
        return None if top is None else top[1:]

    def first_at(self, home: int) -> SequenceId | None:
        """Return the sequence that has waited longest for this replica. None if there is none."""
        names = self._by_home.get(home)
        while names:
            if self._waiting.get(names[0], (0, None))[1] == home:
                return names[0]
            names.popleft()
        self._by_home.pop(home, None)
        return None

    def _top(self, heap: list[_Entry], *, bound: bool) -> _Entry | None:
        while heap:
            if self._is_current(heap[0], bound=bound):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _is_current(self, entry: _Entry, *, bound: bool) -> bool:
        waiting = self._waiting.get(entry[1:])
        return waiting is not None and waiting[0] == entry[0] and (waiting[1] is not None) == bound

    def _push(self, heap: list[_Entry], entry: _Entry) -> None:
        heapq.heappush(heap, entry)
        if len(heap) > MIN_OUTDATED_ENTRIES + 2 * len(self._waiting):
            bound = heap is self._bound
            heap[:] = sorted({each for each in heap if self._is_current(each, bound=bound)})
