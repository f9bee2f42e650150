"""The work queue: each key is queued at most once, and processed by at most one worker at a time and not too often.

add(key) ────────► ready ──► take() ──► done(key) ──► MIN_PAUSE_SECONDS ──► ready, if the key was added meanwhile
add_later(key) ──► later ──┘  ▲ ▲
add_behind(key) ─► behind ────┘ │  when nothing is ready, and after every MAX_AHEAD ready keys
add(slow key) ───► slow ────────┘  by at most a quarter of the workers

A key is slow for SLOW_MEMORY_SECONDS after its processing has taken SLOW_SECONDS. The usual reason is an admission webhook that does
not answer. Without a limit, the trainings whose objects it keeps back would hold all workers. For the same reason one namespace gets at
most three quarters of the workers: nobody knows before the first try that a key is slow.
"""

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from qwen35_operator.kube.line import Line
from qwen35_operator.kube.store import TrainingKey
from qwen35_trainer.contract.retry import backoff_seconds

MIN_PAUSE_SECONDS = 0.25
"""Minimum time from the end of a key's processing to the next one.

Somebody with the rights of one trainer can change a report in a loop, and each change may need a write of the status. Without
this limit, one training could take all the time of the operator, and of the API server.
"""
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 60.0
MAX_AHEAD = 2
"""Maximum number of ready keys in a row that are taken before a key of those behind them. Those behind rarely need a write."""
SLOW_SECONDS, SLOW_MEMORY_SECONDS = 3.0, 60.0
DEFAULT_WORKERS = 8
MIN_SUPERSEDED = 64
"""Number of superseded delays that a queue always keeps, so that a short queue is not rebuilt after every delay."""


class _Taken(NamedTuple):
    """A key that is being processed."""

    since: float
    is_slow: bool


class WorkQueue:
    """The queue of the trainings to reconcile, for one event loop. The key of a training is its namespace and name."""

    def __init__(self, clock: Callable[[], float], workers: int = DEFAULT_WORKERS) -> None:
        """Create an empty queue. clock: returns monotonic seconds. workers: number of workers that take keys."""
        self._clock = clock
        self.share(workers)
        self._ready, self._behind, self._waiting = Line(), Line(), Line()  # _waiting: the slow keys that are ready
        self._ahead = 0  # how many ready keys were taken since the last one of _behind
        self._slow: dict[TrainingKey, float] = {}  # when each was slow last, the oldest first
        self._processing: dict[TrainingKey, _Taken] = {}
        self._requeue: set[TrainingKey] = set()  # added while being processed
        self._later: list[tuple[float, int, TrainingKey]] = []
        self._due: dict[TrainingKey, float] = {}  # the entry of _later that counts
        self._ended: dict[TrainingKey, float] = {}  # when a key was last processed, the oldest first
        self._failures: dict[TrainingKey, int] = {}
        self._number = itertools.count()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready) + len(self._behind) + len(self._waiting)

    def share(self, workers: int) -> None:
        """Set how many of this number of workers may process slow keys, and keys of one namespace, at the same time."""
        self.max_slow = max(1, workers // 4)
        self.max_of_namespace = max(min(2, workers), workers - self.max_slow)

    def add(self, key: TrainingKey) -> None:
        """Enqueue the key for the next free worker, or for the end of its pause.

        A key that is being processed is enqueued when `done` is called.
        """
        rested = self._ended.get(key, -math.inf) + MIN_PAUSE_SECONDS
        if key in self._processing:
            self._due.pop(key, None)
            self._requeue.add(key)
        elif self._clock() < rested:
            self._add_at(key, rested)
        elif not self._is_ready(key):
            self._due.pop(key, None)
            self._behind.discard(key)
            (self._waiting if self._is_slow(key) else self._ready).add(key)
            self._changed.set()

    def _is_ready(self, key: TrainingKey) -> bool:
        return key in self._ready or key in self._waiting

    def _is_slow(self, key: TrainingKey) -> bool:
        return self._clock() - self._slow.get(key, -math.inf) < SLOW_MEMORY_SECONDS

    def add_behind(self, key: TrainingKey) -> None:
        """Enqueue the key behind those that `add` enqueues, now or later. `add` moves it ahead.

        For many keys at a time of which nothing is known to have changed.
        """
        if key in self._processing or key in self._ended or self._is_slow(key):
            self.add(key)
        elif not self._is_ready(key):
            self._behind.add(key)
            self._changed.set()

    def add_later(self, key: TrainingKey, seconds: float) -> None:
        """Enqueue the key as `add` does after this number of seconds, unless it will be there earlier."""
        self._add_at(key, self._clock() + seconds)

    def _add_at(self, key: TrainingKey, due: float) -> None:
        if self._is_ready(key) or key in self._requeue or self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._later, (due, next(self._number), key))
        if len(self._later) > 2 * len(self._due) + MIN_SUPERSEDED:
            self._forget_superseded()
        self._changed.set()

    def add_failed(self, key: TrainingKey, at_least: float = 0.0) -> float:
        """Enqueue the key after a backoff that grows with each failure in a row. Returns the backoff in seconds.

        at_least: minimum backoff in seconds.
        """
        count = self._failures[key] = self._failures.get(key, 0) + 1
        wait = max(at_least, backoff_seconds(count, first=FIRST_BACKOFF_SECONDS, maximum=MAX_BACKOFF_SECONDS))
        self.add_later(key, wait)
        return wait

    def succeeded(self, key: TrainingKey) -> None:
        """Forget the failures of the key, so that its next backoff is FIRST_BACKOFF_SECONDS."""
        self._failures.pop(key, None)

    def clear(self) -> None:
        """Remove all queued keys, and forget all failures. Keys that are being processed stay until `done` is called."""
        for line in (self._ready, self._behind, self._waiting):
            line.clear()
        for keys in (self._slow, self._requeue, self._later, self._due, self._ended, self._failures):
            keys.clear()

    async def take(self) -> TrainingKey:
        """Wait for the next key and return it. No other worker gets this key until `done` is called."""
        while True:
            self._changed.clear()
            wait = self._move_due()
            if (key := self._pop()) is not None:
                self._processing[key] = _Taken(self._clock(), self._is_slow(key))
                return key
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue  # a delayed key is due

    def _pop(self) -> TrainingKey | None:
        """Remove and return the key whose turn it is; None if no key may be processed now."""
        held = Counter(namespace for namespace, _ in self._processing)
        blocked = {namespace for namespace, count in held.items() if count >= self.max_of_namespace}
        may_be_slow = sum(taken.is_slow for taken in self._processing.values()) < self.max_slow
        if may_be_slow and (key := self._waiting.pop(blocked)) is not None:
            return key
        if (self._ahead < MAX_AHEAD or not self._behind) and (key := self._ready.pop(blocked)) is not None:
            self._ahead += 1
            return key
        self._ahead = 0
        if (key := self._behind.pop(blocked)) is not None:
            self._due.pop(key, None)
            return key
        return self._ready.pop(blocked)

    def done(self, key: TrainingKey) -> None:
        """Mark the key as processed. Another worker may take it after its pause, if it is enqueued again."""
        now = self._clock()
        taken = self._processing.pop(key, None)
        if taken is not None and now - taken.since >= SLOW_SECONDS:
            self._slow.pop(key, None)
            self._slow[key] = now
        while self._slow and self._slow[oldest := next(iter(self._slow))] + SLOW_MEMORY_SECONDS <= now:
            del self._slow[oldest]
        self._changed.set()  # another key of the namespace, or another slow one, may be taken now
        self._ended.pop(key, None)
        self._ended[key] = now
        while self._ended[oldest := next(iter(self._ended))] + MIN_PAUSE_SECONDS <= now:
            del self._ended[oldest]
        if key in self._requeue:
            self._requeue.discard(key)
            self.add(key)

    def _forget_superseded(self) -> None:
        """Remove the entries of _later that no longer count, which would stay until they are due."""
        self._later = [entry for entry in self._later if self._due.get(entry[2]) == entry[0]]
        heapq.heapify(self._later)

    def _move_due(self) -> float | None:
        """Enqueue the delayed keys that are due.

        Returns the seconds until the next key is due; None if no key is delayed.
        """
        now = self._clock()
        while self._later:
            due, _, key = self._later[0]
            if self._due.get(key) != due:
                heapq.heappop(self._later)  # superseded
            elif due <= now:
                heapq.heappop(self._later)
                del self._due[key]
                self.add(key)
            else:
                return due - now
        return None
