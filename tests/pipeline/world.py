"""A rollout pool and a train pool in memory, controlled by the test: they carry out the actions of a coordinator.

Every response token is the version of the weights that produced it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.events import Event, SequenceId
from qwen35_trainer.pipeline.scheduling_snapshot import SchedulingSnapshot

EVALUATION = 1 << 40


@dataclass
class Replica:
    slots: int
    version: int
    lane: bool = False
    leaving: bool = False
    is_behind: bool = False
    """It joined with older weights than the published ones, and has not loaded those."""
    running: dict[SequenceId, list[int]] = field(default_factory=dict)


class World:
    """`settings`, and where to begin. `send` passes an event to the coordinator and carries out its actions."""

    def __init__(self, settings: CoordinatorSettings, start: SchedulingSnapshot = SchedulingSnapshot()) -> None:  # noqa: B008, frozen
        self.settings, self.window = settings, settings.window
        self.coordinator = Coordinator(settings, start)
        self.log: list[do.Action] = []
        self.replicas: dict[int, Replica] = {}
        self.joined = 0
        self.positions: dict[int, int] = {}  # of every group ever dispatched
        self.held: dict[int, None] = {}
        self.kept: dict[SequenceId, list[int]] = {}  # tokens of sequences whose replica was lost
        self.finished: dict[SequenceId, list[int]] = {}
        self.unscored: dict[int, None] = {}  # complete groups
        self.next_batch = start.batch
        self.training: do.TrainGroups | None = None
        self.copied: int | None = None
        self.travelling: int | None = None
        self.saving: do.SaveCheckpoint | None = None
        self.saved: list[SchedulingSnapshot] = []
        self.trained: list[int] = []  # positions, in order
        self.gone: list[int] = []  # positions that left for good, untrained
        self.exits: Counter[LeaveReason] = Counter()
        self.evaluating: dict[int, int] = {}  # group → sequences to come
        self.evaluations = 0
        self.masked = 0
        self.ended = False

    def send(self, event: Event) -> None:
        for action in self.coordinator.handle(event):
            self.log.append(action)
            self._carry_out(action)

    def _carry_out(self, action: do.Action) -> None:  # noqa: C901, one case for each action
        match action:
            case do.GroupDispatched(group, position):
                assert group not in self.positions, "a group is dispatched once"
                self.positions[group], self.held[group] = position, None
            case do.GroupLeft(group, position, reason):
                self._leaves(group, position, reason)
            case do.StartSequences(replica, sequences):
                assert not self.replicas[replica].is_behind
                for name, keep in sequences:
                    tokens = self.kept.pop(name, [])
                    assert keep <= len(tokens), "only tokens that there are can be kept"
                    self.replicas[replica].running[name] = tokens[:keep]
            case do.MoveSequence(name, source, target):
                tokens = self.replicas[source].running.pop(name)
                assert self.settings.lane_after is not None
                assert len(tokens) >= self.settings.lane_after, "only stragglers go to the lane"
                assert self.replicas[target].lane
                self.replicas[target].running[name] = tokens
            case do.CancelSequences(replica, names):
                for name in names:
                    del self.replicas[replica].running[name]
            case do.TrainGroups():
                self._takes(action)
            case do.CopyWeights(version):
                assert self.training is None, "weights are copied before the next batch changes them"
                assert self.copied is None
                self.copied = version
            case do.PublishWeights(version):
                assert (self.copied, self.travelling) == (version, None)
                assert not self.evaluating, "an evaluation is of one version"
                self.copied, self.travelling = None, version
            case do.VersionPublished(version):
                assert all(replica.version >= version for replica in self.replicas.values() if not replica.is_behind)
                self.travelling = None
            case do.VersionEvaluated():
                assert not self.evaluating
            case do.SaveCheckpoint():
                assert self.training is None, "a checkpoint is taken between two batches"
                assert self.saving is None, "one is written at a time"
                assert action.snapshot.batch == self.next_batch
                self.saving = action
            case do.RunEnded():
                assert (self.training, self.saving) == (None, None), "the end waits for what is under way"
                self.ended = True

    def _takes(self, batch: do.TrainGroups) -> None:
        assert self.training is None
        assert batch.batch == self.next_batch
        self.next_batch += 1
        assert batch.version == self.window.version_of(batch.batch)
        assert len(set(batch.groups)) == self.window.groups_per_batch
        if self.settings.taking_turns:
            assert not self.running, "pools that take turns do not generate while they train"
        for group in batch.groups:
            del self.held[group]
            for index in range(self.settings.group_size):
                versions = self.finished.pop((group, index))
                # Back by one where a replica is lost that already has the version that travels.
                assert all(later >= earlier - 1 for earlier, later in pairwise(versions))
                if not self.settings.partial_rollout:
                    assert len(set(versions)) == 1, "each sequence comes from one version"
                old = sum(batch.version - version > self.window.max_version_lag for version in versions)
                self.masked += old
                assert not old or self.settings.on_missed_deadline is MissedDeadlinePolicy.MASK_TOKENS, "the bound"
            self.trained.append(self.positions[group])
            self.exits[LeaveReason.TRAINED] += 1
        self.training = batch

    def _leaves(self, group: int, position: int, reason: LeaveReason) -> None:
        assert self.positions[group] == position
        del self.held[group]
        self.unscored.pop(group, None)
        self.exits[reason] += 1
        for index in range(self.settings.group_size):
            self.finished.pop((group, index), None)
            self.kept.pop((group, index), None)
        if reason is not LeaveReason.DISCARDED:
            self.gone.append(position)

    # What the pools do.

    def join(self, slots: int, *, lane: bool = False, newest: bool = True, behind: int = 0) -> int:
        """`newest`: with the version that travels, if one does. `behind`: with one so much older than the published one."""
        version = self.travelling if newest and self.travelling is not None else self.coordinator.version
        version = max(0, self.coordinator.version - behind) if behind else version
        number, self.joined = self.joined, self.joined + 1
        self.replicas[number] = Replica(slots, version, lane, is_behind=version < self.coordinator.version)
        self.send(on.ReplicaJoined(number, slots, version, lane))
        return number

    def lose(self, number: int, keep: int) -> None:
        """The first `keep` tokens of each of its sequences are available."""
        kept = {name: tokens[:keep] for name, tokens in self.replicas.pop(number).running.items()}
        self.kept |= kept
        self.send(on.ReplicaLost(number, {name: len(tokens) for name, tokens in kept.items()}))

    def leave(self, number: int, leaving: bool) -> None:
        self.replicas[number].leaving = leaving
        self.send(on.ReplicaLeaving(number, leaving))

    def generate(self, number: int, tokens: int) -> None:
        replica = self.replicas[number]
        for generated in replica.running.values():
            generated.extend([replica.version] * tokens)

    def tell(self, number: int) -> None:
        """Report births and lengths, as late as the test decides."""
        begun = {name: list(tokens) for name, tokens in self.replicas[number].running.items() if tokens}
        for name, tokens in begun.items():
            self.send(on.SequenceStarted(name, tokens[0]))
        self.send(on.SequencesProgressed({name: len(tokens) for name, tokens in begun.items()}))

    def finish(self, name: SequenceId) -> None:
        replica = next(replica for replica in self.replicas.values() if name in replica.running)
        tokens = replica.running.pop(name) or [replica.version]
        if name[0] in self.evaluating:
            self.evaluating[name[0]] -= 1
            if not self.evaluating[name[0]]:
                del self.evaluating[name[0]]
        else:
            self.finished[name] = tokens
            if all((name[0], index) in self.finished for index in range(self.settings.group_size)):
                self.unscored[name[0]] = None
        self.send(on.SequenceFinished(name, len(tokens)))

    def score(self, group: int, *, signal: bool = True) -> None:
        del self.unscored[group]
        self.send(on.GroupScored(group, signal))

    def load(self, number: int, *, next_only: bool = False) -> None:
        """The newest version, or with `next_only` the next one: a replica that is behind may have several to load."""
        replica = self.replicas[number]
        newest = self.coordinator.version if self.travelling is None else self.travelling
        if replica.version < newest:
            replica.version = replica.version + 1 if next_only else newest
            replica.is_behind &= replica.version < self.coordinator.version
            self.send(on.VersionLoaded(number, replica.version))

    def train(self) -> None:
        assert self.training is not None
        done, self.training = self.training, None
        self.send(on.BatchTrained(done.batch))

    def save(self) -> None:
        assert self.saving is not None
        done, self.saving = self.saving, None
        self.saved.append(done.snapshot)
        self.send(on.CheckpointCompleted(done.snapshot.batch))

    def evaluate(self, version: int, groups: int = 2, samples: int = 2) -> None:
        first, self.evaluations = EVALUATION + 100 * self.evaluations, self.evaluations + 1
        names = tuple(range(first, first + groups))
        self.evaluating = dict.fromkeys(names, samples) if version <= self.coordinator.version else {}
        self.send(on.EvaluationRequested(version, names, samples))

    @property
    def running(self) -> list[SequenceId]:
        return [name for replica in self.replicas.values() for name in replica.running]

    def play(self, slots: int = 4) -> None:
        """On to the end, whatever the state: everything that can happen happens."""
        while not self.ended:
            before = len(self.log)
            if not any(not replica.lane and not replica.leaving for replica in self.replicas.values()):
                self.join(slots)
            for number in list(self.replicas):
                self.load(number)
            for name in self.running:
                if any(name in replica.running for replica in self.replicas.values()):
                    self.finish(name)
            for group in list(self.unscored):
                if group in self.unscored:  # else a batch, filled by another's score, has discarded it
                    self.score(group)
            if self.training is not None:
                self.train()
            if self.saving is not None:
                self.save()
            assert self.ended or len(self.log) > before, "nothing can happen, and work remains"
