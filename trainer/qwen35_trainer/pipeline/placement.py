"""Places sequences on the replicas of the rollout pool and of the straggler lane, which decodes long sequences faster.

    dispatch ─► a new group ──place──► replica of the pool ──SequenceFinished──► done
                    │                    ▲     │      │
                    │ no free slot       │     │      └── past afterTokens, if it gains time ─► replica of the lane ─► done
                    └──────► waiting ────┘     │
                                ▲              ├── drop: its group left
                                └─ lost, refused ◄

Group affinity: the samples of one prompt go to the least loaded replica, which computes the prompt once for all of
them. Samples for which this replica has no free slot wait for one. Meanwhile other replicas take new groups. Waiting
leaves no slot idle: if no new group may be dispatched, a replica with a free slot takes sequences that wait for another
replica. A group is divided among replicas if whole groups would leave some replicas without work (`_share`), or if too
many sequences would wait for one replica (BOUND_SHARE).

Sequences of a lost replica or of an evaluation may go to any replica. Sequences of an evaluation are placed first, then
those with the earliest birth (the version of a sequence's oldest token). A sequence that waits for its group's replica
may also go to any replica once a version has been published since its dispatch. Events about groups that have left are
ignored.

A straggler is a sequence with at least `lane_after` tokens. It moves to the lane if the move gains time
(`lane_decision.py`). Stragglers with earlier deadlines move first. One command moves all stragglers that go from one
replica to another at one moment. A straggler that does not move is considered again when it has grown, or when the lane
changes (`stragglers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.pipeline.commands import Action
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.finished_lengths import FinishedLengths
from qwen35_trainer.pipeline.lane_decision import Straggler, gained_seconds, sequence_limit
from qwen35_trainer.pipeline.replicas import ReplicaPool, ReplicaState
from qwen35_trainer.pipeline.sequences import EVALUATION_POSITION, PlacedGroup, PlacedSequence, WaitingSequences
from qwen35_trainer.pipeline.stragglers import Stragglers

EVALUATION_PRIORITY = -1
"""Priority of an evaluation's sequences: lower than every version and batch number, so that they are placed first.

The reason is that the next publication waits for the evaluation.
"""
RUNNING_SHARE = 0.5
"""Assumed share of the window's groups that are being generated.

The other groups of the window have finished, or have trained since the last publication.
"""
BOUND_SHARE = 0.25
"""Maximum number of sequences that wait for one replica, as a share of its slots.

With this limit, a sequence waits for at most about this share of the time that one response takes.
"""
MAX_OBSERVED_LENGTHS = 1000
"""Approximate number of the latest finished sequences over which the mean response length is computed."""


class Placement:
    """Tracks all groups in the pipeline, and chooses the replicas that generate their sequences.

    buffer: receives the birth of each group (the version of the group's oldest token). settings: configure the straggler
    lane and group affinity. prompt_tokens_of: returns the number of tokens of the prompt at a position.
    """

    def __init__(self, buffer: Buffer, settings: CoordinatorSettings, prompt_tokens_of: Callable[[int], int]) -> None:
        self.groups: dict[int, PlacedGroup] = {}
        self.pool, self.lane = ReplicaPool(), ReplicaPool()
        self.behind = ReplicaPool()
        """Replicas that joined with weights older than the published version.

        They get no sequences until they have loaded that version.
        """
        self._buffer, self._settings, self._prompt_tokens_of = buffer, settings, prompt_tokens_of
        self._lane_after = math.inf if settings.lane_after is None else settings.lane_after
        self._waiting = WaitingSequences()
        self._homes_with_slots: dict[int, None] = {}  # replicas with a free slot for which sequences may wait
        self._stragglers = Stragglers()
        self._lengths = FinishedLengths(settings.max_response_tokens)
        self._mean_length, self._observed_lengths = 0.0, 0

    @property
    def running(self) -> int:
        """The number of sequences on replicas."""
        return self.pool.sequence_count + self.lane.sequence_count

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a replica."""
        return len(self._waiting)

    def add(self, number: int, position: int, samples: int) -> None:
        """Add a new group of `samples` sequences.

        The sequences are not started or enqueued here: `place` and `add_evaluation` do this afterwards.
        """
        self.groups[number] = PlacedGroup(position, [PlacedSequence() for _ in range(samples)], samples)

    def add_evaluation(self, numbers: Iterable[int], samples: int) -> None:
        """Add the groups of an evaluation, and enqueue their sequences before all others.

        samples: sequences per group.
        """
        for number in numbers:
            self.add(number, EVALUATION_POSITION, samples)
            for index in range(samples):
                self._waiting.add((number, index), EVALUATION_PRIORITY)

    def drop(self, numbers: Iterable[int], actions: list[Action]) -> None:
        """Remove the sequences of the groups `numbers` from the queue and from their replicas.

        Appends to `actions` the commands that cancel running sequences. The groups stay in `groups` until the caller
        removes them.
        """
        cancelled: dict[int, list[SequenceId]] = {}
        for number in numbers:
            for index, sequence in enumerate(self.groups[number].sequences):
                if sequence.replica is None:
                    self._waiting.remove((number, index))
                else:
                    cancelled.setdefault(sequence.replica, []).append((number, index))
                    self._release((number, index), sequence)
        actions += [do.CancelSequences(replica, tuple(names)) for replica, names in cancelled.items()]

    # Replicas.

    def pool_of(self, number: int) -> ReplicaPool:
        """Return the collection that holds the replica `number`: `pool`, `lane` or `behind`.

        Returns `pool` for a replica that is in none of the three.
        """
        if number in self.pool:
            return self.pool
        return next((pool for pool in (self.lane, self.behind) if number in pool), self.pool)

    def join(self, event: on.ReplicaJoined) -> bool:
        """Add a replica. Returns whether it may get sequences now.

        The result is False if its weights are older than the published version. The replica is then in `behind` until
        `catch_up` removes it from there. Raises ValueError if the replica has joined already.
        """
        if any(event.replica in pool for pool in (self.pool, self.lane, self.behind)):
            raise ValueError(f"replica {event.replica} joins twice")
        self.behind.add(ReplicaState(event.replica, event.slots, event.version, event.lane, event.token_room))
        return self.catch_up(event.replica, event.version)

    def catch_up(self, number: int, version: int) -> bool:
        """Record that replica `number`, which is still catching up (in `behind`), has loaded `version`.

        Returns whether the replica may get sequences now. If `version` is older than the published version, the result
        is False, and the replica stays in `behind`.
        """
        if version < self._buffer.published:
            return False
        replica = self.behind.remove(number)
        replica.version = version
        (self.lane if replica.lane else self.pool).add(replica)
        self._stragglers.reconsider_all()
        return True

    def set_leaving(self, event: on.ReplicaLeaving) -> None:
        """Mark a replica as leaving or not leaving. A leaving replica gets no sequences.

        Sequences that wait for the replica may then go to any replica. Does nothing for an unknown replica.
        """
        pool = self.pool_of(event.replica)
        if event.replica in pool:
            pool.set_leaving(event.replica, event.leaving)
            self._unbind(event.replica)
            self._trust_if_none_is_left()
            self._stragglers.reconsider_all()

    def set_doubted(self, number: int, *, doubted: bool) -> None:
        """Mark a replica as doubted or not doubted. A doubted replica gets no sequences while the pool has others.

        Sequences that wait for the replica may then go to any replica. Does nothing for an unknown replica.
        """
        pool = self.pool_of(number)
        if number in pool:
            pool.set_doubted(number, doubted)
            self._unbind(number)
            self._trust_if_none_is_left()
            self._stragglers.reconsider_all()

    def _trust_if_none_is_left(self) -> None:
        """Let all doubted replicas take sequences if no other replica of the pool may: nothing would ever start otherwise."""
        if not all(replica.is_closed for replica in self.pool):
            return
        for pool in (self.pool, self.lane):
            for replica in pool:
                pool.set_doubted(replica.number, doubted=False)

    @property
    def drained(self) -> frozenset[int]:
        """The numbers of leaving replicas that hold no sequences."""
        replicas = (replica for pool in (self.pool, self.lane, self.behind) for replica in pool)
        return frozenset(replica.number for replica in replicas if replica.leaving and not replica.sequences)

    def measured(self, event: on.ReplicaMeasured) -> None:
        """Record the measured times of a replica. Does nothing for an unknown replica."""
        if (replica := self.pool_of(event.replica).get(event.replica)) is not None:
            replica.times = event.times
            self._stragglers.reconsider_all()

    def lose(self, event: on.ReplicaLost, *, keep: bool) -> ReplicaState:
        """Remove a lost replica, enqueue the replica's sequences, and return the removed replica.

        keep: whether each sequence keeps the tokens that are still available (`ReplicaLost.kept`); if False, all
        sequences start over. Raises KeyError for an unknown replica.
        """
        replica = self.pool_of(event.replica).remove(event.replica)
        self._unbind(event.replica)
        self._trust_if_none_is_left()
        for name in replica.sequences:
            self._stragglers.discard(name)
            sequence = self.groups[name[0]].sequences[name[1]]
            sequence.replica = None
            self._enqueue_again(name, event.kept.get(name, sequence.tokens_at_start) if keep else 0)
        return replica

    def refused(self, event: on.SequenceRefused, *, keep: bool) -> None:
        """Doubt a replica that could not generate a sequence, and enqueue the sequence, unless it has moved or left.

        keep: whether the sequence keeps the tokens that are available.
        """
        self.set_doubted(event.replica, doubted=True)
        group = self.groups.get(event.sequence[0])
        if group is None or (sequence := group.sequences[event.sequence[1]]).replica != event.replica:
            return
        self._release(event.sequence, sequence)
        self._enqueue_again(event.sequence, event.tokens if keep else 0)

    def _enqueue_again(self, name: SequenceId, tokens: int) -> None:
        """Enqueue a sequence that has lost its replica, with its first `tokens` tokens."""
        sequence = self.groups[name[0]].sequences[name[1]]
        sequence.tokens = tokens
        if tokens == 0:
            sequence.born = None
        self._enqueue(name)
        self._report_birth(name[0])

    def _unbind(self, number: int) -> None:
        """Let the sequences that wait for the replica `number` go to any replica."""
        self._waiting.unbind(number)
        self._homes_with_slots.pop(number, None)

    # Sequences.

    def started(self, event: on.SequenceStarted) -> None:
        """Record the version of a sequence's first token. Does nothing if the sequence already has tokens."""
        group = self.groups.get(event.sequence[0])
        if group is None:
            return
        sequence = group.sequences[event.sequence[1]]
        if sequence.born is None or (sequence.born < event.version and sequence.tokens == 0):
            sequence.born = event.version
            self._report_birth(event.sequence[0])

    def progressed(self, event: on.SequencesProgressed) -> None:
        """Record the number of tokens of running sequences.

        The next call of `move_stragglers` considers the sequences that have become long enough for the straggler lane.
        """
        gained: dict[int, int] = {}  # replica → tokens
        groups, straggler = self.groups, self._lane_after
        for name, tokens in event.tokens.items():  # hot: called every few tokens of a run
            group = groups.get(name[0])
            if group is None:
                continue
            sequence = group.sequences[name[1]]
            before, replica = sequence.tokens, sequence.replica
            if replica is None or tokens <= before:
                continue
            sequence.tokens = tokens
            gained[replica] = gained.get(replica, 0) + tokens - before
            if tokens >= straggler and replica not in self.lane:
                self._stragglers.grow(name, tokens) if before >= straggler else self._add_straggler(name)
        for number, count in gained.items():
            self.pool_of(number).grow(number, count)

    def finished(self, event: on.SequenceFinished) -> bool:
        """Record that a sequence is complete. Returns whether its group is complete now."""
        group = self.groups.get(event.sequence[0])
        if group is None or group.sequences[event.sequence[1]].done:
            return False
        sequence = group.sequences[event.sequence[1]]
        if sequence.replica is None:
            self._waiting.remove(event.sequence)
        else:
            self._release(event.sequence, sequence)
        sequence.tokens, sequence.done = event.tokens, True
        group.unfinished -= 1
        self._observe_length(event.tokens)
        return group.unfinished == 0

    def _release(self, name: SequenceId, sequence: PlacedSequence) -> None:
        """Remove a sequence from its replica, so that the slot is free."""
        assert sequence.replica is not None
        self._stragglers.discard(name)
        pool = self.pool_of(sequence.replica)
        if pool is self.lane:
            self._stragglers.reconsider_all()
        pool.remove_sequence(sequence.replica, name, sequence.tokens)
        if self._waiting.has_bound(sequence.replica):
            self._homes_with_slots[sequence.replica] = None
        sequence.replica = None

    def _observe_length(self, tokens: int) -> None:
        self._lengths.add(tokens)
        self._observed_lengths = min(self._observed_lengths + 1, MAX_OBSERVED_LENGTHS)
        self._mean_length += (tokens - self._mean_length) / self._observed_lengths
        self.pool.expect(self._mean_length)
        self.lane.expect(self._mean_length)

    # Slots.

    def move_stragglers(self, actions: list[Action]) -> None:
        """Move stragglers (long sequences) to the lane, the earliest deadline first, while the lane has room.

        Considers only stragglers that are due for a decision. Moves those that gain time, or all of them if the setting
        `lane_breaks_even` is False. Appends one MoveSequences to `actions` for each pair of replicas.
        """
        moves: dict[tuple[int, int], list[SequenceId]] = {}
        for name in self._stragglers.take_due():
            if (target := self._room_in_lane()) is None:
                break
            sequence = self.groups[name[0]].sequences[name[1]]
            assert sequence.replica is not None
            if self._gains(name, target):
                moves.setdefault((sequence.replica, target.number), []).append(name)
                self._move(name, sequence, target)
        actions += [do.MoveSequences(*replicas, tuple(names)) for replicas, names in moves.items()]

    def _room_in_lane(self) -> ReplicaState | None:
        """Return the least loaded replica of the lane, or None if no straggler may move there."""
        target = self.lane.least_loaded()
        if target is None or not self._settings.lane_breaks_even:
            return target
        return target if len(target.sequences) < sequence_limit(target.times) else None

    def _gains(self, name: SequenceId, target: ReplicaState) -> bool:
        """Return whether moving a straggler to `target` is expected to save more time than it costs.

        The result is always True if `lane_breaks_even` is False in the settings.
        """
        if not self._settings.lane_breaks_even:
            return True
        group = self.groups[name[0]]
        sequence = group.sequences[name[1]]
        assert sequence.replica is not None
        source = self.pool[sequence.replica]
        prompt = 0 if group.is_evaluation else self._prompt_tokens_of(group.position)
        straggler = Straggler(prompt, sequence.tokens, self._lengths.remaining(sequence.tokens))
        held, taken = len(source.sequences), len(target.sequences)
        return gained_seconds(straggler, source.times, target.times, held=held, taken=taken) > 0

    def _move(self, name: SequenceId, sequence: PlacedSequence, target: ReplicaState) -> None:
        self._release(name, sequence)
        self.lane.add_sequence(target, name, sequence.tokens)
        sequence.replica, sequence.tokens_at_start = target.number, sequence.tokens
        self._update_birth(name[0], sequence, target)

    def place(self, actions: list[Action], dispatch: Callable[[list[Action]], int | None]) -> None:
        """Start waiting sequences on free slots, and then fill the remaining slots with new groups.

        Once no new group may be dispatched, free slots take sequences that wait for another replica. Appends one
        StartSequences to `actions` for each replica. dispatch: adds a new group and returns its number, or returns None
        if no group may be dispatched.
        """
        starts: dict[int, list[tuple[SequenceId, int]]] = {}
        self._place_waiting(starts)
        while (replica := self.pool.least_loaded()) is not None:
            if (number := dispatch(actions)) is not None:
                self._place_new(number, starts)
            elif (name := self._waiting.first_bound()) is not None:
                self._start(name, self._replica_for(name) or replica, starts)
            else:
                break
        actions += [do.StartSequences(replica, tuple(names)) for replica, names in starts.items()]

    def _place_waiting(self, starts: dict[int, list[tuple[SequenceId, int]]]) -> None:
        """Start the sequences that any replica may take, then those that wait for a replica with a free slot.

        starts: the sequences to start, by replica. The method adds the started sequences.
        """
        while (name := self._waiting.first(before=self._buffer.published)) is not None:
            if self._bind(name):
                continue
            if (replica := self._replica_for(name)) is None:
                return
            self._start(name, replica, starts)
        for number in self._homes_with_slots:
            home = self.pool[number]
            while home.is_open and (name := self._waiting.first_at(number)) is not None:
                self._start(name, home, starts)
        self._homes_with_slots.clear()

    def _place_new(self, number: int, starts: dict[int, list[tuple[SequenceId, int]]]) -> None:
        """Start the sequences of a new group, and enqueue those for which no slot is free.

        starts: the sequences to start, by replica. The method adds the started sequences.
        """
        for index in range(len(self.groups[number].sequences)):
            name = (number, index)
            if self._bind(name):
                continue
            if (replica := self._replica_for(name)) is None:
                self._enqueue(name)
            else:
                self._start(name, replica, starts)

    def _bind(self, name: SequenceId) -> bool:
        """Let a sequence wait for its group's replica, if that replica is full and not too many already wait for it.

        Returns whether the sequence waits there. A sequence that has tokens, that belongs to an evaluation, or that has
        waited since before the last publication never does.
        """
        group = self.groups[name[0]]
        home = self.pool.get(group.home)
        if home is None or home.is_closed or home.is_open or group.home_room < 1:
            return False
        queued = self._waiting.priority(name)
        priority = self._priority(name) if queued is None else queued
        if group.sequences[name[1]].tokens or priority < self._buffer.published:
            return False
        group.home_room -= 1
        self._waiting.add(name, priority, home.number)
        return True

    def _start(self, name: SequenceId, replica: ReplicaState, starts: dict[int, list[tuple[SequenceId, int]]]) -> None:
        """Assign a sequence to a replica, and add the sequence to `starts`, the sequences to start, by replica."""
        group = self.groups[name[0]]
        sequence = group.sequences[name[1]]
        self._waiting.remove(name)
        (self.lane if replica.lane else self.pool).add_sequence(replica, name, sequence.tokens)
        sequence.replica, sequence.tokens_at_start = replica.number, sequence.tokens
        if sequence.tokens == 0 and replica.number == group.home:
            group.home_room -= 1
        if self._is_straggler(sequence) and not replica.lane:
            self._add_straggler(name)
        self._update_birth(name[0], sequence, replica)
        starts.setdefault(replica.number, []).append((name, sequence.tokens))

    def _replica_for(self, name: SequenceId) -> ReplicaState | None:
        """Return the replica that takes a waiting sequence, or None if no slot is free.

        A straggler gets a replica of the lane, or one of the pool if the lane has no room. Any other sequence gets a
        replica of the pool: its group's replica if it has no tokens yet, otherwise the least loaded one. While the
        pool has no replica, all sequences get a replica of the lane.
        """
        group = self.groups[name[0]]
        sequence = group.sequences[name[1]]
        if self._is_straggler(sequence) and (room := self._room_in_lane()) is not None:
            return room
        if not len(self.pool) and (lane := self.lane.least_loaded()) is not None:
            return lane
        if sequence.tokens > 0:
            return self.pool.least_loaded()
        home = self.pool.get(group.home)
        return home if home is not None and home.is_open and group.home_room > 0 else self._choose_home(group)

    def _choose_home(self, group: PlacedGroup) -> ReplicaState | None:
        """Choose the least loaded replica for the next sequences of a group, and return it.

        Returns None, and changes nothing, if no slot is free.
        """
        replica = self.pool.least_loaded()
        if replica is not None:
            room = replica.slots - len(replica.sequences) + int(BOUND_SHARE * replica.slots)
            group.home, group.home_room = replica.number, min(self._share(group), room)
        return replica

    def _share(self, group: PlacedGroup) -> int:
        """Return the maximum number of sequences of a group that go to one replica.

        With group affinity, the result is the size of the group, or less if the window has so few groups that other
        replicas would get no sequences. Without group affinity, the result is 1.
        """
        samples = len(group.sequences)
        if not self._settings.group_affinity:
            return 1
        sequences = self._buffer.window.limit * RUNNING_SHARE * samples
        return min(samples, math.ceil(sequences / len(self.pool)))

    def _is_straggler(self, sequence: PlacedSequence) -> bool:
        return sequence.tokens >= self._lane_after

    def _update_birth(self, number: int, sequence: PlacedSequence, replica: ReplicaState) -> None:
        """Set the birth of a sequence that was just assigned to `replica`.

        A sequence without tokens gets the version of the replica. A sequence with tokens gets it only if it is older
        than the present birth. The replica may have an older version than the one that generated the first token,
        because a version may be in transfer.
        """
        born_before = None if sequence.tokens == 0 else sequence.born
        born = replica.version if born_before is None else min(born_before, replica.version)
        if born != sequence.born:
            had_none, sequence.born = sequence.born is None, born
            oldest = self.groups[number].oldest
            if not (had_none and oldest is not None and oldest <= born):  # otherwise the group is as old as before
                self._report_birth(number)

    def _report_birth(self, number: int) -> None:
        """Report the version of the group's oldest token to the buffer, which computes the group's deadline from it.

        If no sequence has a token yet, report the published version, because no future token can be older.
        """
        group = self.groups[number]
        if not group.is_evaluation:
            born = [sequence.born for sequence in group.sequences if sequence.born is not None]
            group.oldest = min(born, default=None)
            self._buffer.born(number, self._buffer.published if group.oldest is None else group.oldest)

    def _add_straggler(self, name: SequenceId) -> None:
        """Add a sequence that runs outside the lane to the stragglers, which are considered for the lane."""
        is_evaluation = self.groups[name[0]].is_evaluation
        deadline = EVALUATION_PRIORITY if is_evaluation else self._buffer.deadline(name[0])
        self._stragglers.add(name, self.groups[name[0]].sequences[name[1]].tokens, deadline)

    def _enqueue(self, name: SequenceId) -> None:
        """Enqueue a sequence for any replica."""
        self._waiting.add(name, self._priority(name))

    def _priority(self, name: SequenceId) -> int:
        """Return the priority of a waiting sequence. Sequences with a lower priority are placed first.

        The priority is the birth of the sequence, the published version if it has no birth yet, or EVALUATION_PRIORITY
        if it belongs to an evaluation.
        """
        group = self.groups[name[0]]
        born = EVALUATION_PRIORITY if group.is_evaluation else group.sequences[name[1]].born
        return self._buffer.published if born is None else born
