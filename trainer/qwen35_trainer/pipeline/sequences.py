"""The sequences of all groups in the pipeline: those on replicas, and a priority queue of those that wait.

    add ──────────────► any replica     in order of priority, the lowest first
    add, with a home ─► one replica     the next free slot there; after `unbind` any replica

The home of a group is the replica that has computed the group's prompt. If the home has no free slot, the remaining
sequences of the group may wait for one. `first` limits this wait: it also returns a sequence that waits for its home if
the priority of the sequence is below the number `before`.

The heaps may contain entries of sequences that no longer wait. Such an entry is removed when it reaches the top, or
when there are too many of them (`MIN_OUTDATED_ENTRIES`).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from qwen35_trainer.pipeline.events import SequenceId

type _Entry = tuple[int, int, int]  # (priority, group, index)

EVALUATION_POSITION = -1
"""The value of `PlacedGroup.position` for the groups of an evaluation, whose prompts are not training data."""
MIN_OUTDATED_ENTRIES = 64
"""Outdated entries are removed from a heap that has more entries than this number plus twice the number of waiting
sequences.
"""


@dataclass(slots=True)
class PlacedSequence:
    """One sequence of a group: its replica, its number of tokens so far, and the oldest version of its tokens."""

    tokens: int = 0
    tokens_at_start: int = 0
    """Number of response tokens that the sequence had when it was last sent to a replica.

    With partial rollout, the sequence continues from these tokens if the replica is lost before the sequence arrives.
    """
    born: int | None = None
    """The oldest version that can have generated a token of the sequence.

    None while the sequence has neither a token nor a replica.
    """
    replica: int | None = None
    done: bool = False


@dataclass(slots=True)
class PlacedGroup:
    """The sequences that are sampled for one prompt, and the replicas that generate them."""

    position: int
    sequences: list[PlacedSequence]
    unfinished: int
    home: int | None = None
    """The replica that gets the group's sequences without tokens, so that their prompt is computed only once.

    None if no replica is chosen yet.
    """
    home_room: int = 0
    """The number of the group's sequences that may still go to its home replica."""
    oldest: int | None = None
    """The minimum of the births of the sequences, as it was last reported to the buffer. None if no sequence has one."""

    @property
    def is_evaluation(self) -> bool:
        return self.position == EVALUATION_POSITION


class WaitingSequences:
    """The sequences that wait for a replica.

    An operation takes amortised time O(log n), where n is the number of waiting sequences.
    """

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, tuple[int, int | None]] = {}  # name → (priority, home)
        self._anywhere: list[_Entry] = []
        self._bound: list[_Entry] = []
        self._by_home: dict[int, deque[SequenceId]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: SequenceId, priority: int, home: int | None = None) -> None:
        """Enqueue a sequence for the replica `home`, or for any replica if `home` is None.

        priority: `first` and `first_bound` return the sequence with the lowest number.
        """
        self._waiting[name] = (priority, home)
        if home is None:
            self._push(self._anywhere, (priority, *name))
        else:
            self._push(self._bound, (priority, *name))
            self._by_home.setdefault(home, deque()).append(name)

    def priority(self, name: SequenceId) -> int | None:
        """Return the priority with which a sequence was enqueued, or None if it does not wait."""
        return self._waiting.get(name, (None, None))[0]

    def remove(self, name: SequenceId) -> None:
        """Remove a sequence, because a replica has taken it or it does not need a replica any more.

        Does nothing if the sequence is not waiting.
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

        False is always correct. True can be wrong, because a sequence that no longer waits is removed late.
        """
        return home in self._by_home

    def first(self, before: int) -> SequenceId | None:
        """Return the sequence with the lowest priority number among those that any replica may take.

        Any replica may take a sequence without a home, and also a sequence with a home if its priority number is below
        `before`. Returns None if there is no such sequence.
        """
        anywhere, bound = self._top(self._anywhere, bound=False), self._top(self._bound, bound=True)
        if bound is not None and bound[0] < before and (anywhere is None or bound < anywhere):
            anywhere = bound
        return None if anywhere is None else anywhere[1:]

    def first_bound(self) -> SequenceId | None:
        """Return the sequence with the lowest priority number among those that wait for their home replica.

        Returns None if no sequence waits for its home replica.
        """
        top = self._top(self._bound, bound=True)
        return None if top is None else top[1:]

    def first_at(self, home: int) -> SequenceId | None:
        """Return the sequence that has waited longest for the replica `home`, or None if no sequence waits for it."""
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
