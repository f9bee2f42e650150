"""The sequences of groups that are generated or wait to train: where each is, and which of them wait for a replica.

    add ──────────────► any replica     in order of priority, the lowest first
    add, with a home ─► one replica     the next free slot there; after `unbind` any replica

If a group did not fit on a replica, its remaining sequences wait for that replica, their home, which has computed the
prompt already. This wait is limited: once the priority of a sequence is below `before`, the caller's limit, any replica
may take it.

Heap entries of sequences that no longer wait are removed when they reach the top, or when they outnumber the valid
entries.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from qwen35_trainer.pipeline.events import SequenceId

type _Entry = tuple[int, int, int]  # (priority, group, index)

EVALUATION_POSITION = -1
"""The `position` of every group of an evaluation. Such a group never enters the window."""
MIN_OUTDATED_ENTRIES = 64
"""Outdated entries are removed from a heap that has more entries than this number plus twice the number of waiting
sequences.
"""


@dataclass(slots=True)
class PlacedSequence:
    """One sequence of a group: its replica, its number of tokens so far, and the version of its first token."""

    tokens: int = 0
    tokens_at_start: int = 0
    """Number of tokens known when the sequence was last placed or moved.

    If the replica is lost before the sequence has reached it, the sequence continues from these tokens (with partial
    rollout).
    """
    born: int | None = None
    """The version of the sequence's first token, or an older version if only a lower bound is known.

    None while the sequence has neither a token nor a replica.
    """
    replica: int | None = None
    done: bool = False


@dataclass(slots=True)
class PlacedGroup:
    """The sequences that are sampled for one prompt, and where they are."""

    position: int
    sequences: list[PlacedSequence]
    unfinished: int
    home: int | None = None
    """The replica to which the group's new sequences go, so that it computes their prompt only once.

    None: not chosen yet.
    """
    home_room: int = 0
    """The number of the group's sequences that may still go to its home replica."""

    @property
    def is_evaluation(self) -> bool:
        return self.position == EVALUATION_POSITION


class WaitingSequences:
    """The sequences that wait for a replica. With n of them, an operation takes amortised time O(log n)."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, tuple[int, int | None]] = {}  # name → (priority, home)
        self._anywhere: list[_Entry] = []
        self._bound: list[_Entry] = []
        self._by_home: dict[int, deque[SequenceId]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: SequenceId, priority: int, home: int | None = None) -> None:
        """Enqueue a sequence. priority: the lowest is first. home: the replica that it waits for; None: any replica."""
        self._waiting[name] = (priority, home)
        if home is None:
            self._push(self._anywhere, (priority, *name))
        else:
            self._push(self._bound, (priority, *name))
            self._by_home.setdefault(home, deque()).append(name)

    def remove(self, name: SequenceId) -> None:
        """Remove a sequence, because it has a replica now or needs none any more.

        A sequence that does not wait is ignored.
        """
        self._waiting.pop(name, None)

    def unbind(self, home: int) -> None:
        """Let the sequences that wait for the replica `home` go to any replica."""
        for name in self._by_home.pop(home, ()):
            priority, bound_to = self._waiting.get(name, (0, None))
            if bound_to == home:
                self.add(name, priority)

    def has_bound(self, home: int) -> bool:
        """Return whether sequences wait for the replica `home`.

        A result of False is certain. A result of True can be wrong, because sequences that no longer wait are removed
        late.
        """
        return home in self._by_home

    def first(self, before: int) -> SequenceId | None:
        """Return the sequence with the lowest priority among those that any replica may take. None if there is none.

        before: sequences that wait for their home replica are included if their priority is below this number.
        """
        anywhere, bound = self._top(self._anywhere, bound=False), self._top(self._bound, bound=True)
        if bound is not None and bound[0] < before and (anywhere is None or bound < anywhere):
            anywhere = bound
        return None if anywhere is None else anywhere[1:]

    def first_bound(self) -> SequenceId | None:
        """Return the sequence with the lowest priority among those that wait for their home replica.

        None if none waits.
        """
        top = self._top(self._bound, bound=True)
        return None if top is None else top[1:]

    def first_at(self, home: int) -> SequenceId | None:
        """Return the sequence that has waited longest for the replica `home`. None if no sequence waits for it."""
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
