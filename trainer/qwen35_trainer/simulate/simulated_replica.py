"""One rollout replica in virtual time.

All sequences of a replica grow at the same rate, so the replica keeps one number for all of them. This number is its
`service`: the tokens that a sequence would have if it had been on the replica from the start. A sequence that joins at
service 500 and stops after 2000 tokens stops at the mark 2500, even if the rate changes meanwhile. The marks are in a
heap, and the lowest one is the next stop. The service at which new weights were loaded is also kept. It divides the
tokens of a sequence among versions.
"""

from __future__ import annotations

import heapq
from math import inf

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.simulate.cost_model import ReplicaSpeed

ROUNDING_TOLERANCE_TOKENS = 1e-6
"""The service may miss a mark by this much because of rounding, and still counts as having reached it."""
MAX_VERSION_MARKS = 64
"""Above this number of loaded versions, those that no running sequence needs are forgotten."""


class SimulatedSequence:
    """One response, on a replica or waiting for one."""

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
        """Final number of tokens."""
        self.tokens = 0.0
        """Tokens in `spans`: all except those of the present stretch of decoding."""
        self.spans: list[tuple[int, float]] = []
        """(version, tokens), in the order of generation."""
        self.joined = 0.0
        """The replica's service at the start of the present stretch."""
        self.stamp = 0
        """Identifies its entry in the replica's heap. 0 while it does not decode."""
        self.stop = 0.0
        """Number of tokens at its next stop."""
        self.replica: SimulatedReplica | None = None
        """The replica that holds it."""
        self.turns = 0
        """Number of completed turns."""
        self.in_environment = False
        """Whether the environment answers: the sequence keeps its slot and decodes nothing."""
        self.crossed = False
        """Whether the coordinator knows that it is long enough for the lane."""

    def keep(self, tokens: int) -> None:
        """Drop all but the first `tokens` tokens."""
        spans, remaining = [], float(tokens)
        for version, count in self.spans:
            if remaining > 0:
                spans.append((version, min(count, remaining)))
            remaining -= count
        self.spans, self.tokens = spans, float(tokens)


class SimulatedReplica:
    """A replica and the sequences that it holds. All methods act at the time of the latest `advance`."""

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
        """Number of sequences that decode. Those between two turns do not."""
        self.service = 0.0
        self.ready = now
        """When it decodes again. Prefill and loading weights stop it."""
        self.due = inf
        """When the caller wakes it next."""
        self.decoding = self.busy = 0.0
        """Sequence-seconds, and seconds, of decoding."""
        self.leaving = self.lost = False
        self._now = now
        self._marks: list[tuple[float, int, SimulatedSequence]] = []  # (service at the stop, stamp, sequence)
        self._versions = [(0.0, version)]  # (service, version from then on)
        self._stamps = 0
        self._step_seconds = [speed.step(sequences) for sequences in range(speed.slots + 1)]

    def advance(self, now: float) -> None:
        """Decode from the previous moment up to `now`."""
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
        """Decode nothing for `seconds` seconds."""
        self.ready = max(self.ready, self._now) + seconds

    def begin_decoding(self, sequence: SimulatedSequence, until: float, extra_steps: float = 0.0) -> None:
        """Begin to decode a sequence until it has `until` tokens, after `extra_steps` steps that give no token."""
        self.active += 1
        sequence.joined = self.service + extra_steps
        self.set_stop(sequence, until)

    def set_stop(self, sequence: SimulatedSequence, until: float) -> None:
        """Let a decoding sequence stop next when it has `until` tokens."""
        self._stamps += 1
        sequence.stamp, sequence.stop = self._stamps, until
        heapq.heappush(self._marks, (sequence.joined + until - sequence.tokens, self._stamps, sequence))

    def end_decoding(self, sequence: SimulatedSequence) -> None:
        """Stop decoding a sequence, and record which version gave each of its tokens."""
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
        """Decode with the weights of `version` from now on."""
        self.version = version
        self._versions.append((self.service, version))
        if len(self._versions) > MAX_VERSION_MARKS:
            decoding = (sequence.joined for sequence in self.held.values() if sequence.stamp)
            earliest = max(min(decoding, default=self.service), 0.0)
            first = max(index for index, (since, _) in enumerate(self._versions) if since <= earliest)
            self._versions = self._versions[first:]

    def next_stopped(self) -> SimulatedSequence | None:
        """Return a sequence that has reached its next stop, and remove that stop; None if no sequence has."""
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
        """Return the moment of the next stop at the present rate; infinity without a stop.

        The result may be too early, because the heap may still contain stops of sequences that no longer decode.
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
    """The present slots and replicas of a pool, and the slot-seconds and replica-seconds that it has had so far."""

    __slots__ = ("_since", "replica_seconds", "replicas", "slot_seconds", "slots")

    def __init__(self) -> None:
        self.slots = self.replicas = 0
        self.slot_seconds = self.replica_seconds = self._since = 0.0

    def advance(self, now: float) -> None:
        """Add the slot-seconds and replica-seconds since the previous call."""
        self.slot_seconds += self.slots * (now - self._since)
        self.replica_seconds += self.replicas * (now - self._since)
        self._since = now

    def add(self, now: float, replicas: int, slots: int) -> None:
        """Add replicas and slots, or remove them if the numbers are negative."""
        self.advance(now)
        self.replicas += replicas
        self.slots += slots
