"""A rollout pool and a train pool in memory, controlled by the test: they carry out the actions of a coordinator.

Every response token is the version of the weights that produced it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.commands import Action, SchedulingSnapshot
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.events import Event, SequenceId
from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.pipeline.replica_times import UNMEASURED, ReplicaTimes
from qwen35_trainer.pipeline.requests import EvaluateVersion, Request, StopTraining

EVALUATION = 1 << 40
PROMPT_TOKENS = 3


@dataclass
class Replica:
    slots: int
    version: int
    lane: bool = False
    leaving: bool = False
    doubted: bool = False
    is_behind: bool = False
    """It joined with older weights than the published ones, and has not loaded those."""
    token_room: int | None = None
    times: ReplicaTimes = UNMEASURED
    running: dict[SequenceId, list[int]] = field(default_factory=dict)

    @property
    def has_free_slot(self) -> bool:
        return not self.is_closed and not self.is_behind and len(self.running) < self.slots

    @property
    def is_closed(self) -> bool:
        return self.leaving or self.doubted


@dataclass
class Evaluation:
    version: int
    unfinished: dict[int, int]
    """Group → sequences to come."""
    is_running: bool = False
    outcome: str = ""


class World:
    """`settings`, and where to begin. `send` passes inputs to the coordinator and carries out its actions."""

    def __init__(self, settings: CoordinatorSettings, start: SchedulingSnapshot = SchedulingSnapshot()) -> None:  # noqa: B008, frozen
        self.settings, self.window = settings, settings.window
        self.coordinator = Coordinator(settings, start, prompt_tokens_of=lambda position: PROMPT_TOKENS)
        self.log: list[Action] = []
        self.replicas: dict[int, Replica] = {}
        self.joined = 0
        self.positions: dict[int, int] = {}  # of every group ever dispatched
        self.held: dict[int, None] = {}
        self.reported: dict[SequenceId, list[int]] = {}  # tokens of each running sequence that the coordinator knows
        self.tokens_at_start: dict[
            SequenceId, list[int]
        ] = {}  # tokens that it knew when each was last started or moved
        self.kept: dict[SequenceId, list[int]] = {}  # tokens of sequences whose replica was lost
        self.places: dict[int, set[int]] = {}  # group → replicas on which its sequences started
        self.finished: dict[SequenceId, list[int]] = {}
        self.unscored: dict[int, None] = {}  # complete groups
        self.next_batch = start.batch
        self.training: do.TrainGroups | None = None
        self.copying: int | None = None
        self.copied: int | None = None
        self.travelling: int | None = None
        self.saving: do.SaveCheckpoint | None = None
        self.saved: list[SchedulingSnapshot] = []
        self.trained: list[int] = []  # positions, in order
        self.gone: list[int] = []  # positions that left for good, untrained
        self.exits: Counter[LeaveReason] = Counter()
        self.evaluations: list[Evaluation] = []
        self.masked = 0
        self.longest = 0  # tokens of the longest finished response
        self.is_stopping = self.ended = False
        self._collected: list[Event | Request] | None = None

    def send(self, *inputs: Event | Request) -> None:
        if self._collected is not None:
            self._collected += inputs
            return
        actions = self.coordinator.handle(*inputs)
        ways = [(each.source, each.target) for each in actions if isinstance(each, do.MoveSequences)]
        assert len(ways) == len(set(ways)), "what moves from one replica to another at one moment moves together"
        if self.settings.taking_turns and not self.is_stopping:
            kinds = {type(action) for action in actions}
            assert not {do.SaveCheckpoint, do.StartSequences} <= kinds, (
                "what starts would be dropped for the checkpoint"
            )
        for action in actions:
            assert not self.ended, "nothing follows the end"
            self.log.append(action)
            self._carry_out(action)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What happens inside reaches the coordinator together."""
        self._collected = []
        yield
        inputs, self._collected = self._collected, None
        self.send(*inputs)

    def _carry_out(self, action: Action) -> None:  # noqa: C901, one case for each action
        match action:
            case notices.GroupDispatched(group, position):
                assert group not in self.positions, "a group is dispatched once"
                self.positions[group], self.held[group] = position, None
            case notices.GroupLeft(group, position, reason):
                self._leaves(group, position, reason)
            case do.StartSequences(replica, sequences):
                assert not self.replicas[replica].is_behind
                assert not self.replicas[replica].is_closed
                for name, keep in sequences:
                    tokens = self.kept.pop(name, [])
                    assert keep == (len(tokens) if self.settings.partial_rollout else 0), "all that there are, no more"
                    self.replicas[replica].running[name] = tokens[:keep]
                    self.reported[name] = self.tokens_at_start[name] = tokens[:keep]
                    self.places.setdefault(name[0], set()).add(replica)
                    if name[0] >= EVALUATION:
                        self._evaluation_of(name[0]).is_running = True
            case do.MoveSequences(source, target, names):
                assert self.replicas[target].lane
                assert not self.replicas[source].lane
                for name in names:
                    if self.settings.lane_breaks_even:
                        self._is_worth_moving(name, self.replicas[source], self.replicas[target])
                    tokens = self.replicas[source].running.pop(name)
                    assert self.settings.lane_after is not None
                    assert len(tokens) >= self.settings.lane_after, "only stragglers go to the lane"
                    self.replicas[target].running[name] = tokens
                    self.tokens_at_start[name] = self.reported[name]
            case do.CancelSequences(replica, names):
                if replica in self.replicas:  # else it was lost in the same moment
                    for name in names:
                        self.replicas[replica].running.pop(name, None)  # it may have finished in the same moment
            case do.TrainGroups():
                self._takes(action)
            case do.CopyWeights(version):
                assert self.training is None, "weights are copied before the next batch changes them"
                assert (self.copying, self.copied) == (None, None)
                assert not self.is_stopping, "a stop publishes nothing more"
                self.copying = version
            case do.PublishWeights(version):
                assert (self.copied, self.travelling) == (version, None)
                assert not any(each.is_running for each in self.evaluations), "an evaluation is of one version"
                self.copied, self.travelling = None, version
            case notices.VersionPublished(version):
                assert all(replica.version >= version for replica in self.replicas.values() if not replica.is_behind)
                self.travelling = None
            case notices.VersionEvaluated(version):
                done = next(each for each in self.evaluations if each.version == version and not each.outcome)
                assert not done.unfinished
                done.outcome, done.is_running = "evaluated", False
            case notices.EvaluationSkipped(version):
                skipped = next(each for each in self.evaluations if each.version == version and not each.outcome)
                skipped.outcome, skipped.is_running = "skipped", False
            case do.SaveCheckpoint():
                assert self.training is None, "a checkpoint is taken between two batches"
                assert self.saving is None, "one is written at a time"
                assert action.snapshot.batch == self.next_batch
                if self.settings.taking_turns and not self.is_stopping:
                    assert not self.running, "pools that take turns do not generate while a checkpoint is copied"
                self.saving = action
            case notices.RunEnded():
                assert (self.training, self.saving) == (None, None), "the end waits for what is under way"
                self.ended = True

    def _is_worth_moving(self, name: SequenceId, source: Replica, target: Replica) -> None:
        """Assert what must be true of a move, however long the rest of the sequence is expected to be.

        Times of steps are equal for all numbers of sequences here, so the formula can be seen from outside.
        """
        assert source.times.is_measured, "nothing moves before it was measured how fast it is where it is"
        if not target.times.is_measured:
            assert not target.running, "a replica that was never measured is tried with one"
            return
        assert len(target.running) < 2 * target.times.largest, "twice what was measured"
        faster = source.times.steps[0][1] - target.times.steps[0][1]
        present = len(self.reported[name])
        prefill = (PROMPT_TOKENS * (name[0] < EVALUATION) + present) * target.times.prefill_seconds_per_token
        most = (max(self.settings.max_response_tokens, self.longest) - present) * faster
        assert most > prefill * (len(target.running) + 1) + source.times.hand_over_seconds, "it gains nothing"

    def _takes(self, batch: do.TrainGroups) -> None:
        assert (self.training, self.copying) == (None, None), "the weights are copied before the next batch"
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

    def join(
        self, slots: int, *, lane: bool = False, newest: bool = True, behind: int = 0, token_room: int | None = None
    ) -> int:
        """`newest`: with the version that travels, if one does. `behind`: with one so much older than the published one."""
        version = self.travelling if newest and self.travelling is not None else self.coordinator.version
        version = max(0, self.coordinator.version - behind) if behind else version
        number, self.joined = self.joined, self.joined + 1
        is_behind = version < self.coordinator.version
        self.replicas[number] = Replica(slots, version, lane, is_behind=is_behind, token_room=token_room)
        self.send(on.ReplicaJoined(number, slots, version, lane, token_room))
        return number

    def lose(self, number: int, keep: int | None) -> None:
        """The first `keep` tokens of each of its sequences are available. None: those with which it was started or moved."""
        running = self.replicas.pop(number).running
        self._trust_if_all_are_closed()
        if keep is None:
            self.kept |= {name: self.tokens_at_start[name] for name in running}
            self.send(on.ReplicaLost(number))
            return
        kept = {name: tokens[:keep] for name, tokens in running.items()}
        self.kept |= kept
        self.send(on.ReplicaLost(number, {name: len(tokens) for name, tokens in kept.items()}))

    def measure(self, number: int, step: float, prefill: float = 0.0, hand_over: float = 0.0) -> None:
        """Report the speed of a replica, as measured with the sequences that it holds now, or with more before."""
        replica = self.replicas[number]
        most = max(1.0, float(len(replica.running)), replica.times.largest)
        replica.times = ReplicaTimes(((most, step),), prefill, hand_over)
        self.send(on.ReplicaMeasured(number, replica.times))

    def leave(self, number: int, leaving: bool) -> None:
        self.replicas[number].leaving = leaving
        self._trust_if_all_are_closed()
        self.send(on.ReplicaLeaving(number, leaving))

    def refuse(self, name: SequenceId, keep: int) -> None:
        """The replica that has a sequence reports that it cannot generate it. The first `keep` of its tokens are available."""
        number, replica = next(each for each in self.replicas.items() if name in each[1].running)
        self.kept[name] = replica.running.pop(name)[:keep]
        replica.doubted = True
        self._trust_if_all_are_closed()
        self.send(on.SequenceRefused(name, number, len(self.kept[name])))

    def trust(self, number: int) -> None:
        self.replicas[number].doubted = False
        self.send(on.ReplicaTrusted(number))

    def _trust_if_all_are_closed(self) -> None:
        """Only replicas of the pool count: the lane alone generates nothing."""
        if all(each.is_closed for each in self.replicas.values() if not each.lane and not each.is_behind):
            for each in self.replicas.values():
                each.doubted &= each.is_behind

    def generate(self, number: int, tokens: int) -> None:
        replica = self.replicas[number]
        for generated in replica.running.values():
            generated.extend([replica.version] * tokens)

    def tell(self, number: int) -> None:
        """Report births and lengths, as late as the test decides."""
        begun = {name: list(tokens) for name, tokens in self.replicas[number].running.items() if tokens}
        for name, tokens in begun.items():
            self.send(on.SequenceStarted(name, tokens[0]))
        self.reported |= begun
        self.send(on.SequencesProgressed({name: len(tokens) for name, tokens in begun.items()}))

    def finish(self, name: SequenceId) -> None:
        replica = next(replica for replica in self.replicas.values() if name in replica.running)
        tokens = replica.running.pop(name) or [replica.version]
        if name[0] >= EVALUATION:
            evaluation = self._evaluation_of(name[0])
            assert set(tokens) <= {evaluation.version}, "an evaluation is of one version"
            evaluation.unfinished[name[0]] -= 1
            if not evaluation.unfinished[name[0]]:
                del evaluation.unfinished[name[0]]
        else:
            self.finished[name] = tokens
            if all((name[0], index) in self.finished for index in range(self.settings.group_size)):
                self.unscored[name[0]] = None
        self.longest = max(self.longest, len(tokens))
        self.send(on.SequenceFinished(name, len(tokens)))

    def score(self, group: int, *, signal: bool = True) -> None:
        del self.unscored[group]
        self.send(on.GroupScored(group, signal))

    def fail(self, group: int) -> None:
        if group >= EVALUATION:
            del self._evaluation_of(group).unfinished[group]
        self.send(on.GroupFailed(group))

    def load(self, number: int, *, next_only: bool = False) -> None:
        """The newest version, or with `next_only` the next one: a replica that is behind may have several to load."""
        replica = self.replicas[number]
        newest = self.coordinator.version if self.travelling is None else self.travelling
        if replica.version < newest:
            replica.version = replica.version + 1 if next_only else newest
            replica.is_behind &= replica.version < self.coordinator.version
            self.send(on.VersionLoaded(number, replica.version))

    def copy(self) -> None:
        assert self.copying is not None
        self.copying, self.copied = None, self.copying
        self.send(on.WeightsCopied(self.copied))

    def train(self, *, copies: bool = True) -> None:
        """`copies`: weights that should be copied are copied immediately."""
        assert self.training is not None
        done, self.training = self.training, None
        self.send(on.BatchTrained(done.batch))
        if copies and self.copying is not None:
            self.copy()

    def save(self) -> None:
        assert self.saving is not None
        done, self.saving = self.saving, None
        self.saved.append(done.snapshot)
        self.send(on.CheckpointCompleted(done.snapshot.batch))

    def evaluate(self, version: int, groups: int = 2, samples: int = 2) -> Evaluation:
        first = EVALUATION + 100 * len(self.evaluations)
        names = tuple(range(first, first + groups))
        evaluation = Evaluation(version, dict.fromkeys(names, samples))
        self.evaluations.append(evaluation)
        self.send(EvaluateVersion(version, names, samples))
        return evaluation

    def _evaluation_of(self, group: int) -> Evaluation:
        return self.evaluations[(group - EVALUATION) // 100]

    def stop(self) -> None:
        """Stop although nothing happens any more but that a batch trains and checkpoints are written."""
        self.is_stopping = True
        self.send(StopTraining())
        while not self.ended and (self.training is not None or self.saving is not None):
            if self.training is not None:
                self.train(copies=False)
            if self.saving is not None:
                self.save()

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
            if self.copying is not None:
                self.copy()
            if self.training is not None:
                self.train()
            if self.saving is not None:
                self.save()
            assert self.ended or len(self.log) > before, "nothing can happen, and work remains"
