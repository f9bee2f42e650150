"""One engine in virtual time.

All sequences of an engine grow at the same rate, so one number serves all of them: its `service`, the tokens that a sequence
would have that had been there from the start. A sequence that joins at service 500 and stops after 2000 tokens stops at the mark
2500, however the rate changes meanwhile. The next stop is the top of a heap of marks; the times at which new weights came are
marks on the same scale, and split a sequence's tokens into versions.
"""

from __future__ import annotations

import heapq
from math import inf

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.simulate.hardware import Engine

NEARLY = 1e-6
"""Of a token: what rounding may leave between the service and a mark that is reached."""


class Sequence:
    """One response, on an engine or waiting for one."""

    __slots__ = (
        "asked",
        "crossed",
        "joined",
        "length",
        "name",
        "replica",
        "spans",
        "stamp",
        "stop",
        "tokens",
        "turns",
    )

    def __init__(self, name: SequenceId, length: int) -> None:
        self.name = name
        self.length = length
        """Tokens that it will have."""
        self.tokens = 0.0
        """Those that `spans` accounts for: all but those of the present stretch on an engine."""
        self.spans: list[tuple[int, float]] = []
        """(version, tokens), in the order in which they were generated."""
        self.joined = 0.0
        """The engine's service when the present stretch began."""
        self.stamp = 0
        """Of its entry in the engine's heap; 0 while it decodes nothing."""
        self.stop = 0.0
        """Tokens at its next stop."""
        self.replica: Replica | None = None
        """Where it is."""
        self.turns = 0
        """Turns that are over."""
        self.asked = False
        """The environment has the next word: it holds its slot and decodes nothing."""
        self.crossed = False
        """It is known to be long enough for the lane."""

    def keep(self, tokens: int) -> None:
        """Forget all but the first `tokens`."""
        spans, rest = [], float(tokens)
        for version, count in self.spans:
            if rest > 0:
                spans.append((version, min(count, rest)))
            rest -= count
        self.spans, self.tokens = spans, float(tokens)


class Replica:
    """An engine and what it holds. Its owner calls `advance` before anything else, at the same moment."""

    __slots__ = (
        "_clock",
        "_loads",
        "_marks",
        "_stamps",
        "_steps",
        "active",
        "busy",
        "decoding",
        "due",
        "held",
        "kind",
        "lane",
        "leaving",
        "lost",
        "number",
        "ready",
        "service",
        "version",
    )

    def __init__(self, number: int, kind: Engine, *, lane: bool, version: int, now: float) -> None:
        self.number, self.kind, self.lane = number, kind, lane
        self.version = version
        self.held: dict[SequenceId, Sequence] = {}
        self.active = 0
        """Sequences that decode; those between two turns do not."""
        self.service = 0.0
        self.ready = now
        """When it decodes again: prefill and new weights stop it."""
        self.due = inf
        """When its owner wakes it next."""
        self.decoding = self.busy = 0.0
        """Sequence-seconds, and seconds, in which it decoded."""
        self.leaving = self.lost = False
        self._clock = now
        self._marks: list[tuple[float, int, Sequence]] = []
        self._loads = [(0.0, version)]  # (service, version since then)
        self._stamps = 0
        self._steps = [kind.step(sequences) for sequences in range(kind.slots + 1)]

    def advance(self, now: float) -> None:
        """Decode up to this moment."""
        start = self._clock
        if now > start:
            self._clock = now
            if self.active:
                start = max(start, self.ready)
                seconds = now - start
                if seconds > 0:
                    self.service += seconds / self._steps[self.active]
                    self.decoding += seconds * self.active
                    self.busy += seconds

    def stop(self, seconds: float) -> None:
        """Decode nothing for so long."""
        self.ready = max(self.ready, self._clock) + seconds

    def join(self, sequence: Sequence, until: float, extra: float = 0.0) -> None:
        """A stretch of decoding begins, up to so many tokens in all, after `extra` steps that give none."""
        self.active += 1
        sequence.joined = self.service + extra
        self.mark(sequence, until)

    def mark(self, sequence: Sequence, until: float) -> None:
        """Its next stop is at so many tokens."""
        self._stamps += 1
        sequence.stamp, sequence.stop = self._stamps, until
        heapq.heappush(self._marks, (sequence.joined + until - sequence.tokens, self._stamps, sequence))

    def part(self, sequence: Sequence) -> None:
        """Its stretch of decoding is over: account for its tokens, by version."""
        self.active -= 1
        sequence.stamp = 0
        service, joined, loads = self.service, sequence.joined, self._loads
        if service <= joined:
            return
        sequence.tokens += service - joined
        at = len(loads) - 1
        while loads[at][0] > joined:
            at -= 1
        for since, version in loads[at:-1]:
            at += 1
            tokens = loads[at][0] - max(since, joined)
            if tokens > 0:
                sequence.spans.append((version, tokens))
        last, version = loads[-1]
        if service > last:
            sequence.spans.append((version, service - max(last, joined)))

    def load(self, version: int) -> None:
        """What is decoded from now on comes from `version`."""
        self.version = version
        self._loads.append((self.service, version))
        if len(self._loads) > 64:
            earliest = min((each.joined for each in self.held.values() if each.stamp), default=self.service)
            first = max(at for at, (since, _) in enumerate(self._loads) if since <= max(earliest, 0.0))
            self._loads = self._loads[first:]

    def reached(self) -> Sequence | None:
        """A sequence that is at its next stop, once per stop; None when there is no other."""
        marks = self._marks
        while marks:
            mark, stamp, sequence = marks[0]
            if sequence.stamp != stamp or sequence.replica is not self:
                heapq.heappop(marks)
                continue
            missing = mark - self.service
            # The second: too little for the clock to tell the two moments apart.
            if missing <= NEARLY or self._clock + missing * self._steps[self.active] <= self._clock:
                heapq.heappop(marks)
                return sequence
            return None
        return None

    def next_stop(self) -> float:
        """The moment at which the next stop is reached if nothing changes, or an earlier one; infinity without any."""
        if not self._marks or not self.active:
            return inf
        missing = self._marks[0][0] - self.service
        return max(self.ready, self._clock) + max(missing, 0.0) * self._steps[self.active]

    def computed(self) -> float:
        """Response tokens of what it holds."""
        return sum(
            each.tokens + (max(self.service - each.joined, 0.0) if each.stamp else 0.0) for each in self.held.values()
        )
