"""The rollout pool and the straggler lane in virtual time: decoding, faults, changes of the pool's size, and publications."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from random import Random

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.replica_times import ReplicaTimes
from qwen35_trainer.simulate.cost_model import PrefillCost, PublicationCost, ReplicaSpeed
from qwen35_trainer.simulate.simulated_replica import Capacity, SimulatedReplica, SimulatedSequence, VirtualClock
from qwen35_trainer.simulate.workload import Workload

UNREPORTED_SHARE = 1 / 8
"""Mean share of a sequence's tokens that a replica has not reported yet, and that are lost with the replica.

A replica reports an eighth of a response at a time (`rollout_worker.PROGRESS_SHARE`). On average, half of that is
unreported, and a running sequence has half of its tokens.
"""


class SimulatedRollout:
    """All rollout replicas of a simulated run. They carry out the coordinator's commands to start, move and cancel sequences."""

    def __init__(
        self,
        workload: Workload,
        clock: VirtualClock,
        send: Callable[[on.Event], None],
        finish: Callable[[SimulatedSequence], None],
    ) -> None:
        """Create a rollout without replicas. `begin` adds the replicas.

        send: passes an event to the coordinator. finish: called with each complete sequence, after
        the sequence has left its replica.
        """
        self.pool, self.lane = Capacity(), Capacity()
        self.lost = self.moves = 0
        self.full_at: float | None = None
        """Time at which all slots of the pool were occupied for the first time; None before."""
        self.prefill_tokens = 0
        """Number of tokens that prefill computed: prompts, and earlier response tokens of sequences that start again."""
        self._held_of_group: Counter[tuple[int, int]] = Counter()  # (replica, group) → sequences
        self._workload, self._clock, self._send, self._finish = workload, clock, send, finish
        self._replicas: dict[int, SimulatedReplica] = {}
        self.publication = SimulatedPublication(workload.publication, workload.prefill, clock, self._replicas, send)
        self._removed = {True: [0.0, 0.0], False: [0.0, 0.0]}  # lane → (decoding, busy) of removed replicas
        lane = () if workload.lane is None else workload.lane.replicas * (workload.lane.replica,)
        self._speeds: list[tuple[ReplicaSpeed, bool]] = [  # (speed, whether it belongs to the lane) by number
            *((speed, False) for speed in workload.replicas),
            *((speed, True) for speed in lane),
        ]
        self._members = list(range(len(workload.replicas)))  # numbers of the replicas that the pool should have
        self._failure_gaps = [workload.faults.gaps(workload.seed, number) for number in range(len(self._speeds))]
        self._latencies = Random(workload.seed)  # noqa: S311, a simulation
        self._pool_sequences = 0  # sequences on the pool
        after = workload.settings.lane_after
        self._lane_after = inf if after is None else float(after)

    def begin(self) -> None:
        """Add all replicas and announce them to the coordinator.

        Also schedule the faults and the changes of the pool's size that the workload lists.
        """
        replicas = [self._add(number) for number in range(len(self._speeds))]
        for replica in replicas:
            self._announce(replica)
        for second, number in self._workload.faults.times:
            self._clock.at(second, self._fail_number, number)
        for second, size in self._workload.elastic:
            self._clock.at(second, self._resize, size)

    # Actions of the coordinator.

    def start(self, number: int, sequences: list[tuple[SimulatedSequence, int]]) -> None:
        """Start sequences on a replica, after a prefill of the prompts and the kept tokens.

        number: number of the replica. sequences: (sequence, number of its response tokens to keep).
        """
        replica = self._replicas[number]
        replica.advance(self._clock.now)
        for sequence, kept in sequences:
            if kept != sequence.tokens:
                sequence.keep(kept)
            sequence.turns = self._workload.turns.count * kept // sequence.length
            sequence.crossed = self._lane_after <= kept
            self._prefill(replica, sequence, kept)
            self._put(replica, sequence, 0.0)
        self._schedule(replica)
        if self.full_at is None and 0 < self.pool.slots <= self._pool_sequences:
            self.full_at = self._clock.now

    def move(self, action: do.MoveSequences) -> None:
        """Move sequences, with all tokens generated so far, from a replica of the pool to a replica of the straggler lane."""
        assert self._workload.lane is not None
        for name in action.sequences:
            sequence = self._release(self._replicas[action.source].held[name])
            replica = self._replicas[action.target]
            replica.advance(self._clock.now)
            self._prefill(replica, sequence, int(sequence.tokens))
            self._put(replica, sequence, self._workload.lane.arrival_steps)
            self._schedule(replica)
            self.moves += 1

    def cancel(self, action: do.CancelSequences) -> None:
        """Remove cancelled sequences from the replica that holds them."""
        for name in action.sequences:
            self._release(self._replicas[action.replica].held[name])

    def _prefill(self, replica: SimulatedReplica, sequence: SimulatedSequence, tokens: int) -> None:
        """Let a replica compute the prompt and the first `tokens` tokens of a sequence that comes to it."""
        prefill = self._workload.prefill
        shares_prompt = prefill.shared and (replica.number, sequence.name[0]) in self._held_of_group
        if not shares_prompt:
            tokens += prefill.prompt_tokens
        self.prefill_tokens += tokens
        replica.pause(prefill.seconds(tokens))

    def _put(self, replica: SimulatedReplica, sequence: SimulatedSequence, extra_steps: float) -> None:
        replica.held[sequence.name] = sequence
        self._held_of_group[replica.number, sequence.name[0]] += 1
        sequence.replica = replica
        self._pool_sequences += not replica.lane
        if not sequence.in_environment:
            replica.begin_decoding(sequence, self._next_stop(sequence), extra_steps)
            if self._workload.lane is not None and replica.active > replica.measured:
                self._clock.after(replica.speed.step(replica.active), self._measure, replica)

    def _measure(self, replica: SimulatedReplica) -> None:
        """Report to the coordinator how long a decode step of a replica takes, for up to as many sequences as decode now."""
        lane, most = self._workload.lane, replica.active
        if lane is None or replica.lost or most <= replica.measured:
            return
        replica.measured = most
        speed = replica.speed
        steps = tuple((float(sequences), speed.step(sequences)) for sequences in sorted({1, most}))
        hand_over = lane.arrival_steps * lane.replica.step(lane.slots)
        times = ReplicaTimes(steps, self._workload.prefill.seconds(1), hand_over)
        self._send(on.ReplicaMeasured(replica.number, times))

    def _release(self, sequence: SimulatedSequence) -> SimulatedSequence:
        """Remove a sequence, with its tokens, from its replica, and return it."""
        replica = sequence.replica
        assert replica is not None
        replica.advance(self._clock.now)
        self._forget(replica, sequence.name)
        sequence.replica = None
        self._pool_sequences -= not replica.lane
        if sequence.stamp:
            replica.end_decoding(sequence)
            self._schedule(replica)
        if replica.leaving and not replica.held:
            self._clock.after(0.0, self._retire, replica)
        return sequence

    def _forget(self, replica: SimulatedReplica, name: SequenceId) -> None:
        del replica.held[name]
        key = (replica.number, name[0])
        self._held_of_group[key] -= 1
        if not self._held_of_group[key]:
            del self._held_of_group[key]

    # Decoding.

    def _schedule(self, replica: SimulatedReplica) -> None:
        """Have the clock wake a replica at its next stop.

        If the clock would wake the replica earlier anyway, nothing changes: the replica then wakes too early, and is
        scheduled again.
        """
        time = replica.next_stop_time()
        if time < replica.due:
            replica.due = time
            self._clock.at(time, self._wake, replica)

    def _wake(self, replica: SimulatedReplica) -> None:
        if replica.lost or replica.due != self._clock.now:
            return
        replica.due = -inf  # no change inside this method needs an entry: it schedules at its end
        replica.advance(self._clock.now)
        while (sequence := replica.next_stopped()) is not None:
            self._at_stop(replica, sequence)
        replica.due = inf
        self._schedule(replica)

    def _at_stop(self, replica: SimulatedReplica, sequence: SimulatedSequence) -> None:
        """Handle a stop of a sequence.

        The sequence has ended, has become long enough for the lane, or has come to the end of a turn.
        """
        if sequence.stop == sequence.length:
            self._finish(self._release(sequence))
        elif sequence.stop == self._lane_after and not sequence.crossed:
            sequence.crossed = True
            replica.set_stop(sequence, self._next_stop(sequence))
            self._send(on.SequencesProgressed({sequence.name: int(self._lane_after)}))
        else:
            replica.end_decoding(sequence)
            sequence.turns += 1
            sequence.in_environment = True
            latency = self._workload.turns.latency
            seconds = self._latencies.expovariate(1 / latency) if latency else 0.0
            self._clock.after(seconds, self._environment_answered, sequence)

    def _environment_answered(self, sequence: SimulatedSequence) -> None:
        """Continue to decode a sequence on the same replica after the environment has answered."""
        if not sequence.in_environment:
            return  # it was lost meanwhile, and starts this turn over
        sequence.in_environment = False
        if sequence.replica is not None:
            sequence.replica.advance(self._clock.now)
            sequence.replica.begin_decoding(sequence, self._next_stop(sequence))
            self._schedule(sequence.replica)

    def _next_stop(self, sequence: SimulatedSequence) -> float:
        """Return the number of tokens that a sequence has at its next stop.

        The stop is the end of the sequence, the end of a turn, or the length from which it may
        move to the lane, whichever is first.
        """
        stop = float(sequence.length)
        turns = self._workload.turns.count
        if sequence.turns + 1 < turns:
            stop = stop * (sequence.turns + 1) / turns
        return stop if sequence.crossed else min(stop, self._lane_after)

    # Faults, and other sizes of the pool.

    def _add(self, number: int) -> SimulatedReplica:
        """Add a new or returning replica with the newest version whose publication has begun."""
        speed, lane = self._speeds[number]
        replica = self._replicas[number] = SimulatedReplica(
            number, speed, lane=lane, version=self.publication.newest, now=self._clock.now
        )
        (self.lane if lane else self.pool).add(self._clock.now, 1, speed.slots)
        for gap in self._failure_gaps[number]:
            self._clock.after(gap, self._fail, replica)
            break
        return replica

    def _announce(self, replica: SimulatedReplica) -> None:
        self._send(on.ReplicaJoined(replica.number, replica.speed.slots, replica.version, replica.lane))

    def _fail_number(self, number: int) -> None:
        if number in self._replicas:
            self._fail(self._replicas[number])

    def _fail(self, replica: SimulatedReplica) -> None:
        """Report a replica as lost, and schedule its return after the time to repair."""
        if replica.lost:
            return
        kept = {}
        for sequence in tuple(replica.held.values()):
            self._release(sequence)
            sequence.in_environment = False
            reported = int((1 - UNREPORTED_SHARE) * sequence.tokens)
            kept[sequence.name] = reported if self._workload.faults.keep else 0
        self.lost += 1
        self._remove(replica)
        if replica.lane or replica.number in self._members:
            self._clock.after(self._workload.faults.mttr, self._return, replica.number)
        self._send(on.ReplicaLost(replica.number, kept))

    def _return(self, number: int) -> None:
        if number not in self._replicas and (self._speeds[number][1] or number in self._members):
            self._announce(self._add(number))

    def _resize(self, size: int) -> None:
        """Change the number of the pool's replicas to `size`.

        The newest replicas leave first, once they hold no sequence.
        """
        while len(self._members) > size:
            number = self._members.pop()
            if replica := self._replicas.get(number):
                replica.leaving = True
                self._send(on.ReplicaLeaving(number))
                if not replica.held:
                    self._retire(replica)
        while len(self._members) < size:
            self._grow()

    def _grow(self) -> None:
        """Add one replica to the pool.

        If a replica is about to leave, it stays. Otherwise a new replica joins, of the last kind in the workload.
        """
        staying = next((replica for replica in self._replicas.values() if replica.leaving), None)
        if staying is not None:
            staying.leaving = False
            self._members.append(staying.number)
            self._send(on.ReplicaLeaving(staying.number, leaving=False))
        else:
            number = len(self._speeds)
            self._speeds.append((self._workload.replicas[-1], False))
            self._failure_gaps.append(self._workload.faults.gaps(self._workload.seed, number))
            self._members.append(number)
            self._announce(self._add(number))

    def _retire(self, replica: SimulatedReplica) -> None:
        """Remove a replica that is leaving and holds no sequence. For any other replica, do nothing."""
        if replica.leaving and not replica.lost and not replica.held:
            self._remove(replica)
            self._send(on.ReplicaLost(replica.number))

    def _remove(self, replica: SimulatedReplica) -> None:
        replica.lost = True
        replica.advance(self._clock.now)
        del self._replicas[replica.number]
        (self.lane if replica.lane else self.pool).add(self._clock.now, -1, -replica.speed.slots)
        removed = self._removed[replica.lane]
        removed[0], removed[1] = removed[0] + replica.decoding, removed[1] + replica.busy

    # Measurement.

    def decoded(self, *, lane: bool) -> tuple[float, float]:
        """Return the time that replicas have decoded so far, as (sequence-seconds, replica-seconds).

        lane: whether to sum over the replicas of the straggler lane; otherwise over those of the pool.
        """
        for replica in self._replicas.values():
            replica.advance(self._clock.now)
        replicas = [replica for replica in self._replicas.values() if replica.lane is lane]
        decoding, busy = self._removed[lane]
        return decoding + sum(replica.decoding for replica in replicas), busy + sum(
            replica.busy for replica in replicas
        )


class SimulatedPublication:
    """Publishes versions of the weights to the replicas of a simulated run.

    A publication transfers the version. Then each replica pauses to load it, and generates with it after the pause.
    """

    def __init__(
        self,
        cost: PublicationCost,
        prefill: PrefillCost,
        clock: VirtualClock,
        replicas: Mapping[int, SimulatedReplica],
        send: Callable[[on.VersionLoaded], None],
    ) -> None:
        self.newest = 0
        """The last version whose publication has begun. A replica that joins starts with this version."""
        self._cost, self._prefill, self._clock = cost, prefill, clock
        self._replicas, self._send = replicas, send

    def publish(self, version: int) -> None:
        """Begin the publication of a version: schedule the end of its transfer to every replica."""
        self.newest = version
        self._clock.after(self._cost.transfer, self._arrive, version)

    def _arrive(self, version: int) -> None:
        pause = self._cost.pause if self._cost.rolling else 0.0
        behind = [replica for replica in self._replicas.values() if replica.version < version]
        for place, replica in enumerate(behind):
            self._clock.after(place * pause, self._pause, (replica, version))

    def _pause(self, argument: tuple[SimulatedReplica, int]) -> None:
        replica = argument[0]
        replica.advance(self._clock.now)
        replica.pause(self._cost.pause)
        self._clock.after(self._cost.pause, self._finish_loading, argument)

    def _finish_loading(self, argument: tuple[SimulatedReplica, int]) -> None:
        replica, version = argument
        if replica.lost:
            return
        replica.advance(self._clock.now)
        replica.load(version)
        if self._cost.recompute:
            prompts = {name[0] for name in replica.held} if self._prefill.shared else replica.held
            prompt_tokens = self._prefill.prompt_tokens * len(prompts)
            replica.pause(self._prefill.seconds(prompt_tokens + replica.held_tokens()))
        self._send(on.VersionLoaded(replica.number, version))
