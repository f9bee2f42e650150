"""The virtual clock, and a rollout replica in virtual time.

All sequences of a replica grow at the same rate, so one number is enough for all of them: the replica's
`service`, the number of tokens that a sequence would have if it had been on the replica from the start. A
sequence that joins at service 500 and stops after 2000 tokens therefore stops when the service reaches the mark
2500, even if the rate changes in between.

At a stop, the simulation handles a sequence, for example because the sequence has ended. The marks of all stops are in
a heap, and the lowest mark is the next stop. The service at which each version of the weights was loaded is also kept,
so that the tokens of a sequence can be divided among versions.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from math import inf
from typing import Any

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.simulate.cost_model import ReplicaSpeed

ROUNDING_TOLERANCE_TOKENS = 1e-6
"""Tokens by which a replica's service may be below the mark of a stop, because of rounding,
and the stop still counts as reached."""
MAX_VERSION_MARKS = 64
"""Number of loaded versions that a replica records. When there are more, versions that no
running sequence needs are removed."""


class VirtualClock:
    """Calls functions in order of virtual time. Calls at the same time happen in the order in which they were scheduled."""

    __slots__ = ("_calls", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._serial = itertools.count()

    def at(self, time: float, function: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401, passed to function
        """Schedule the call `function(argument)` at the virtual time `time`, in seconds."""
        heapq.heappush(self._calls, (time, next(self._serial), function, argument))

    def after(self, seconds: float, function: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401, as above
        """Schedule the call `function(argument)` in `seconds` seconds of virtual time from now."""
        heapq.heappush(self._calls, (self.now + seconds, next(self._serial), function, argument))

    def step(self) -> bool:
        """Advance to the time of the next scheduled call, and make this call. Returns False if no call is scheduled."""
        if not self._calls:
            return False
        self.now, _, function, argument = heapq.heappop(self._calls)
        function(argument)
        return True


class SimulatedSequence:
    """One simulated response, which is on a replica or waits for one."""

    __slots__ = (
        "crossed",
        "in_environment",
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
        """Number of tokens that the sequence has when it ends."""
        self.tokens = 0.0
        """Number of tokens at the end of the latest stretch of decoding: the sum of the numbers in `spans`."""
        self.spans: list[tuple[int, float]] = []
        """(version, number of tokens that the version generated), in the order of generation."""
        self.joined = 0.0
        """The replica's service (see `simulated_replica.py`) at the start of the present stretch of decoding."""
        self.stamp = 0
        """Identifies the valid entry of the sequence in the replica's heap of stops. 0 while the sequence does not decode."""
        self.stop = 0.0
        """Number of tokens that the sequence has at its next stop."""
        self.replica: SimulatedReplica | None = None
        """The replica that holds the sequence. None: the sequence waits for a replica."""
        self.turns = 0
        """Number of completed turns of the conversation with the environment (`Turns`)."""
        self.in_environment = False
        """Whether the sequence waits for an answer of the environment. It then keeps its slot, and decodes nothing."""
        self.crossed = False
        """Whether an event has reported to the coordinator that the sequence is long enough for the straggler lane."""

    def keep(self, tokens: int) -> None:
        """Drop all tokens except the first `tokens`. The sequence must not be decoding."""
        spans, remaining = [], float(tokens)
        for version, count in self.spans:
            if remaining > 0:
                spans.append((version, min(count, remaining)))
            remaining -= count
        self.spans, self.tokens = spans, float(tokens)


class SimulatedReplica:
    """A simulated replica and the sequences that it holds.

    Methods other than `advance` act at the time of the latest `advance`.
    """

    __slots__ = (
        "_marks",
        "_now",
        "_stamps",
        "_step_seconds",
        "_versions",
        "active",
        "busy",
        "decoding",
        "due",
        "held",
        "lane",
        "leaving",
        "lost",
        "measured",
        "number",
        "ready",
        "service",
        "speed",
        "version",
    )

    def __init__(self, number: int, speed: ReplicaSpeed, *, lane: bool, version: int, now: float) -> None:
        self.number, self.speed, self.lane = number, speed, lane
        self.version = version
        self.held: dict[SequenceId, SimulatedSequence] = {}
        self.active = 0
        """Number of sequences that decode. Sequences that wait for the environment are not counted."""
        self.measured = 0
        """Largest number of decoding sequences for which the duration of a step was reported to the coordinator."""
        self.service = 0.0
        """Number of tokens that a sequence would have if it had been on the replica from the start."""
        self.ready = now
        """Time before which the replica decodes nothing, because it prefills or loads weights."""
        self.due = inf
        """Time at which the clock next wakes the replica to handle a stop; infinity if no such call is scheduled."""
        self.decoding = self.busy = 0.0
        """Time of decoding so far: `decoding` is the sum over all sequences, in sequence-seconds; `busy` is the time
        with at least one sequence, in seconds."""
        self.leaving = self.lost = False
        self._now = now
        self._marks: list[tuple[float, int, SimulatedSequence]] = []  # (service at the stop, stamp, sequence)
        self._versions = [(0.0, version)]  # (service, version from then on)
        self._stamps = 0
        self._step_seconds = [speed.step(sequences) for sequences in range(speed.slots + 1)]

    def advance(self, now: float) -> None:
        """Decode all active sequences from the time of the previous call up to `now`."""
        start = self._now
        if now > start:
            self._now = now
            if self.active:
                start = max(start, self.ready)
                seconds = now - start
                if seconds > 0:
                    self.service += seconds / self._step_seconds[self.active]
                    self.decoding += seconds * self.active
                    self.busy += seconds

    def pause(self, seconds: float) -> None:
        """Decode nothing for `seconds` seconds, which begin now or at the end of earlier pauses."""
        self.ready = max(self.ready, self._now) + seconds

    def begin_decoding(self, sequence: SimulatedSequence, until: float, extra_steps: float = 0.0) -> None:
        """Begin to decode a sequence, up to a stop at which the simulation handles the sequence, for example ends it.

        until: number of tokens that the sequence has at this stop. extra_steps: number of decode steps before its first
        token.
        """
        self.active += 1
        sequence.joined = self.service + extra_steps
        self.set_stop(sequence, until)

    def set_stop(self, sequence: SimulatedSequence, until: float) -> None:
        """Set the next stop of a sequence that is decoding. The stop that was set before is dropped.

        At a stop, the simulation handles the sequence, for example ends it. until: number of tokens that the sequence
        has at the stop.
        """
        self._stamps += 1
        sequence.stamp, sequence.stop = self._stamps, until
        heapq.heappush(self._marks, (sequence.joined + until - sequence.tokens, self._stamps, sequence))

    def end_decoding(self, sequence: SimulatedSequence) -> None:
        """Stop decoding a sequence, and add to its `spans` how many tokens each version generated."""
        self.active -= 1
        sequence.stamp = 0
        service, joined, versions = self.service, sequence.joined, self._versions
        if service <= joined:
            return
        sequence.tokens += service - joined
        index = len(versions) - 1
        while versions[index][0] > joined:
            index -= 1
        for since, version in versions[index:-1]:
            index += 1
            tokens = versions[index][0] - max(since, joined)
            if tokens > 0:
                sequence.spans.append((version, tokens))
        since, version = versions[-1]
        if service > since:
            sequence.spans.append((version, service - max(since, joined)))

    def load(self, version: int) -> None:
        """Generate all tokens from now on with the weights of `version`. The time of loading is not included."""
        self.version = version
        self._versions.append((self.service, version))
        if len(self._versions) > MAX_VERSION_MARKS:
            decoding = (sequence.joined for sequence in self.held.values() if sequence.stamp)
            earliest = max(min(decoding, default=self.service), 0.0)
            first = max(index for index, (since, _) in enumerate(self._versions) if since <= earliest)
            self._versions = self._versions[first:]

    def next_stopped(self) -> SimulatedSequence | None:
        """Return a sequence that has reached its next stop, and remove this stop; None if there is no such sequence."""
        marks = self._marks
        while marks:
            mark, stamp, sequence = marks[0]
            if sequence.stamp != stamp or sequence.replica is not self:
                heapq.heappop(marks)
                continue
            missing = mark - self.service
            # The second condition: the remaining time is too short to change the floating-point clock.
            reached = missing <= ROUNDING_TOLERANCE_TOKENS
            if reached or self._now + missing * self._step_seconds[self.active] <= self._now:
                heapq.heappop(marks)
                return sequence
            return None
        return None

    def next_stop_time(self) -> float:
        """Return the time of the next stop at the present rate of decoding; infinity if there is no stop.

        At a stop, the simulation handles a sequence, for example because the sequence has ended. The result may be too
        early, because the heap may still contain stops of sequences that no longer decode.
        """
        if not self._marks or not self.active:
            return inf
        missing = self._marks[0][0] - self.service
        return max(self.ready, self._now) + max(missing, 0.0) * self._step_seconds[self.active]

    def held_tokens(self) -> float:
        """Return the number of response tokens of the sequences that this replica holds."""
        return sum(
            sequence.tokens + (max(self.service - sequence.joined, 0.0) if sequence.stamp else 0.0)
            for sequence in self.held.values()
        )


class Capacity:
    """The slots and replicas that a pool has now, and their integrals over time (slot-seconds, replica-seconds)."""

    __slots__ = ("_since", "replica_seconds", "replicas", "slot_seconds", "slots")

    def __init__(self) -> None:
        self.slots = self.replicas = 0
        self.slot_seconds = self.replica_seconds = self._since = 0.0

    def advance(self, now: float) -> None:
        """Update `slot_seconds` and `replica_seconds`, which then include the time up to `now`."""
        self.slot_seconds += self.slots * (now - self._since)
        self.replica_seconds += self.replicas * (now - self._since)
        self._since = now

    def add(self, now: float, replicas: int, slots: int) -> None:
        """Add replicas and slots to the pool at the time `now`. Negative numbers remove them."""
        self.advance(now)
        self.replicas += replicas
        self.slots += slots
