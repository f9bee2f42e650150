"""Work to do: keys, each at most once in the queue and never in two hands.

add(key) ──► ready ──► take() ──► done(key)
add(key, after) ──► later ──┘        └── added meanwhile: ready again
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable

from qwen35_operator.kube.store import Key

FIRST_WAIT, LONGEST_WAIT = 0.1, 60.0
"""Seconds after the first failure of a key, doubled up to the second."""


class Queue:
    """For one event loop. `clock` gives seconds that only go forward."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ready: deque[Key] = deque()
        self._waiting: set[Key] = set()  # in _ready
        self._working: set[Key] = set()
        self._again: set[Key] = set()  # added while in work
        self._later: list[tuple[float, int, Key]] = []
        self._due: dict[Key, float] = {}  # the entry of _later that counts
        self._failures: dict[Key, int] = {}
        self._number = itertools.count()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: Key) -> None:
        """As soon as there is a hand."""
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._changed.set()

    def add_later(self, key: Key, seconds: float) -> None:
        """In so many seconds, unless it comes earlier anyway."""
        due = self._clock() + seconds
        if key in self._waiting or key in self._again or self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._later, (due, next(self._number), key))
        self._changed.set()

    def add_failed(self, key: Key) -> float:
        """After a wait that doubles with each failure in a row. Returns it."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        wait = float(min(FIRST_WAIT * 2.0 ** min(count - 1, 32), LONGEST_WAIT))
        self.add_later(key, wait)
        return wait

    def succeeded(self, key: Key) -> None:
        """The next failure is a first one."""
        self._failures.pop(key, None)

    async def take(self) -> Key:
        """The next key; it is the caller's until `done`."""
        while True:
            self._changed.clear()
            wait = self._move_due()
            if self._ready:
                key = self._ready.popleft()
                self._waiting.discard(key)
                self._working.add(key)
                return key
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue  # something is due

    def done(self, key: Key) -> None:
        """The caller is through with the key."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _move_due(self) -> float | None:
        """Make ready what is due. Returns the seconds until the next one."""
        now = self._clock()
        while self._later:
            due, _, key = self._later[0]
            if self._due.get(key) != due:
                heapq.heappop(self._later)  # superseded
            elif due <= now:
                heapq.heappop(self._later)
                self.add(key)
            else:
                return due - now
        return None
