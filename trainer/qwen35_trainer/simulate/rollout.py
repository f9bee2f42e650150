"""The rollout pool and the lane in virtual time: what engines do, what happens to them, and what the coordinator hears of it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.events import Event
from qwen35_trainer.simulate.capacity import Capacity
from qwen35_trainer.simulate.clock import Clock
from qwen35_trainer.simulate.engine import Replica, Sequence
from qwen35_trainer.simulate.hardware import Engine
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.weights import Weights


class Rollout:
    """All engines of a load."""

    def __init__(
        self, load: Load, clock: Clock, tell: Callable[[Event], None], finish: Callable[[Sequence], None]
    ) -> None:
        """tell: the coordinator hears of an event. finish: a sequence is complete, and off its engine."""
        self.pool, self.lane = Capacity(), Capacity()
        self.lost = self.moves = 0
        self.full: float | None = None
        """When every slot of the pool was taken first."""
        self._load, self._clock, self._tell, self._finish = load, clock, tell, finish
        self._replicas: dict[int, Replica] = {}
        self.weights = Weights(load.publication, load.prefill, clock, self._replicas, tell)
        self._gone = {True: [0.0, 0.0], False: [0.0, 0.0]}  # lane → what engines decoded that are no more
        kinds = load.engines
        lane = () if load.lane is None else load.lane.engines * (load.lane.engine,)
        self._kinds: list[tuple[Engine, bool]] = [*((kind, False) for kind in kinds), *((kind, True) for kind in lane)]
        self._members = list(range(len(kinds)))  # of the pool, as it is meant to be
        self._gaps = [load.faults.gaps(load.seed, number) for number in range(len(self._kinds))]
        self._latency = Random(load.seed)  # noqa: S311, a simulation
        self._placed = 0  # sequences on the pool
        after = load.settings.lane_after
        self._crossing = inf if after is None else float(after)

    def begin(self) -> None:
        """Every engine joins, and what is to befall them is set down."""
        replicas = [self._add(number) for number in range(len(self._kinds))]
        for replica in replicas:
            self._announce(replica)
        for second, number in self._load.faults.times:
            self._clock.at(second, self._fail_listed, number)
        for second, engines in self._load.elastic:
            self._clock.at(second, self._resize, engines)

    # What the coordinator asks for.

    def start(self, worker: int, sequences: list[tuple[Sequence, int]]) -> None:
        """Generate: each sequence from the tokens that it keeps."""
        replica, prefill = self._replicas[worker], self._load.prefill
        replica.advance(self._clock.now)
        for sequence, kept in sequences:
            if kept != sequence.tokens:
                sequence.keep(kept)
            sequence.turns = self._load.turns.count * kept // sequence.length
            sequence.crossed = self._crossing <= kept
            replica.stop(prefill.seconds(prefill.prompt_tokens + kept))
            self._put(replica, sequence, 0.0)
        self._schedule(replica)
        if self.full is None and 0 < self.pool.slots <= self._placed:
            self.full = self._clock.now

    def move(self, action: do.Move) -> None:
        """Hand a sequence to the lane."""
        assert self._load.lane is not None
        sequence = self._release(self._replicas[action.source].held[action.sequence])
        replica = self._replicas[action.target]
        replica.advance(self._clock.now)
        self._put(replica, sequence, self._load.lane.arrival_steps)
        self._schedule(replica)
        self.moves += 1

    def cancel(self, action: do.Cancel) -> None:
        """Drop sequences."""
        for name in action.sequences:
            self._release(self._replicas[action.worker].held[name])

    def _put(self, replica: Replica, sequence: Sequence, extra: float) -> None:
        replica.held[sequence.name] = sequence
        sequence.replica = replica
        self._placed += not replica.lane
        if not sequence.asked:
            replica.join(sequence, self._stop_of(sequence), extra)

    def _release(self, sequence: Sequence) -> Sequence:
        """Take it off its engine, with its tokens."""
        replica = sequence.replica
        assert replica is not None
        replica.advance(self._clock.now)
        del replica.held[sequence.name]
        sequence.replica = None
        self._placed -= not replica.lane
        if sequence.stamp:
            replica.part(sequence)
            self._schedule(replica)
        if replica.leaving and not replica.held:
            self._clock.after(0.0, self._retire, replica)
        return sequence

    # Decoding.

    def _schedule(self, replica: Replica) -> None:
        """Wake it at its next stop. An entry for an earlier moment stays: it comes too soon, and asks again."""
        time = replica.next_stop()
        if time < replica.due:
            replica.due = time
            self._clock.at(time, self._wake, replica)

    def _wake(self, replica: Replica) -> None:
        if replica.lost or replica.due != self._clock.now:
            return
        replica.due = -inf  # whatever happens here asks for no entry
        replica.advance(self._clock.now)
        while (sequence := replica.reached()) is not None:
            self._at_stop(replica, sequence)
        replica.due = inf
        self._schedule(replica)

    def _at_stop(self, replica: Replica, sequence: Sequence) -> None:
        """It is complete, or long enough for the lane, or its turn is over."""
        if sequence.stop == sequence.length:
            self._finish(self._release(sequence))
        elif sequence.stop == self._crossing and not sequence.crossed:
            sequence.crossed = True
            replica.mark(sequence, self._stop_of(sequence))
            self._tell(on.Progressed({sequence.name: int(self._crossing)}))
        else:
            replica.part(sequence)
            sequence.turns += 1
            sequence.asked = True
            latency = self._load.turns.latency
            self._clock.after(self._latency.expovariate(1 / latency) if latency else 0.0, self._answered, sequence)

    def _answered(self, sequence: Sequence) -> None:
        """The environment's part is over: the sequence decodes on, where it is."""
        if not sequence.asked:
            return  # it was lost meanwhile, and begins this turn anew
        sequence.asked = False
        if sequence.replica is not None:
            sequence.replica.advance(self._clock.now)
            sequence.replica.join(sequence, self._stop_of(sequence))
            self._schedule(sequence.replica)

    def _stop_of(self, sequence: Sequence) -> float:
        """Tokens at which something happens next."""
        stop = float(sequence.length)
        turns = self._load.turns.count
        if sequence.turns + 1 < turns:
            stop = stop * (sequence.turns + 1) / turns
        return stop if sequence.crossed else min(stop, self._crossing)

    # Losses, and other sizes.

    def _add(self, number: int) -> Replica:
        """An engine comes, or comes back, with the newest weights that there are."""
        kind, lane = self._kinds[number]
        replica = self._replicas[number] = Replica(
            number, kind, lane=lane, version=self.weights.newest, now=self._clock.now
        )
        (self.lane if lane else self.pool).add(self._clock.now, 1, kind.slots)
        for gap in self._gaps[number]:
            self._clock.after(gap, self._fail, replica)
            break
        return replica

    def _announce(self, replica: Replica) -> None:
        self._tell(on.WorkerJoined(replica.number, replica.kind.slots, replica.version, replica.lane))

    def _fail_listed(self, number: int) -> None:
        if number in self._replicas:
            self._fail(self._replicas[number])

    def _fail(self, replica: Replica) -> None:
        if replica.lost:
            return
        kept = {}
        for sequence in tuple(replica.held.values()):
            self._release(sequence)
            sequence.asked = False
            kept[sequence.name] = int(sequence.tokens) if self._load.faults.keep else 0
        self.lost += 1
        self._remove(replica)
        if replica.lane or replica.number in self._members:
            self._clock.after(self._load.faults.mttr, self._back, replica.number)
        self._tell(on.WorkerLost(replica.number, kept))

    def _back(self, number: int) -> None:
        if number not in self._replicas and (self._kinds[number][1] or number in self._members):
            self._announce(self._add(number))

    def _resize(self, engines: int) -> None:
        """The pool is to have so many: the last to come leave first, once they have finished what they hold."""
        while len(self._members) > engines:
            number = self._members.pop()
            if replica := self._replicas.get(number):
                replica.leaving = True
                self._tell(on.WorkerLeaving(number))
                if not replica.held:
                    self._retire(replica)
        while len(self._members) < engines:
            self._grow()

    def _grow(self) -> None:
        """One more: one that is about to leave, or another of the last kind."""
        stay = next((each for each in self._replicas.values() if each.leaving), None)
        if stay is not None:
            stay.leaving = False
            self._members.append(stay.number)
            self._tell(on.WorkerLeaving(stay.number, leaving=False))
        else:
            number = len(self._kinds)
            self._kinds.append((self._load.engines[-1], False))
            self._gaps.append(self._load.faults.gaps(self._load.seed, number))
            self._members.append(number)
            self._announce(self._add(number))

    def _retire(self, replica: Replica) -> None:
        """It was leaving, and has nothing left."""
        if replica.leaving and not replica.lost and not replica.held:
            self._remove(replica)
            self._tell(on.WorkerLost(replica.number))

    def _remove(self, replica: Replica) -> None:
        replica.lost = True
        replica.advance(self._clock.now)
        del self._replicas[replica.number]
        (self.lane if replica.lane else self.pool).add(self._clock.now, -1, -replica.kind.slots)
        gone = self._gone[replica.lane]
        gone[0], gone[1] = gone[0] + replica.decoding, gone[1] + replica.busy

    # Measures.

    def decoded(self, *, lane: bool) -> tuple[float, float]:
        """So far: (sequence-seconds, engine-seconds) in which something was decoded."""
        for replica in self._replicas.values():
            replica.advance(self._clock.now)
        there = [replica for replica in self._replicas.values() if replica.lane is lane]
        gone = self._gone[lane]
        return gone[0] + sum(each.decoding for each in there), gone[1] + sum(each.busy for each in there)
