"""A rollout pool and a train pool in memory, played by hand: they do what a coordinator asks, when the test lets them.

Every response token is the version of the weights that produced it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.actions import Reason
from qwen35_trainer.pipeline.buffer import OnMissedDeadline
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.events import Event, SequenceId
from qwen35_trainer.pipeline.settings import Settings
from qwen35_trainer.pipeline.snapshot import Snapshot

EVALUATION = 1 << 40


@dataclass
class Worker:
    slots: int
    version: int
    lane: bool = False
    leaving: bool = False
    is_behind: bool = False
    """It joined with older weights than the published ones, and has not loaded those."""
    running: dict[SequenceId, list[int]] = field(default_factory=dict)


class World:
    """`settings`, and where to begin. `send` gives the coordinator an event and carries out what it asks."""

    def __init__(self, settings: Settings, start: Snapshot = Snapshot()) -> None:  # noqa: B008, frozen
        self.settings, self.window = settings, settings.window
        self.coordinator = Coordinator(settings, start)
        self.log: list[do.Action] = []
        self.workers: dict[int, Worker] = {}
        self.joined = 0
        self.positions: dict[int, int] = {}  # of every group ever dispatched
        self.held: dict[int, None] = {}
        self.kept: dict[SequenceId, list[int]] = {}  # tokens of sequences whose worker was lost
        self.finished: dict[SequenceId, list[int]] = {}
        self.unscored: dict[int, None] = {}  # complete groups
        self.next_batch = start.batch
        self.training: do.Train | None = None
        self.copied: int | None = None
        self.travelling: int | None = None
        self.saving: do.Checkpoint | None = None
        self.saved: list[Snapshot] = []
        self.trained: list[int] = []  # positions, in order
        self.gone: list[int] = []  # positions that left for good, untrained
        self.exits: Counter[Reason] = Counter()
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
            case do.Dispatched(group, position):
                assert group not in self.positions, "a group is dispatched once"
                self.positions[group], self.held[group] = position, None
            case do.Left(group, position, reason):
                self._leaves(group, position, reason)
            case do.Start(worker, sequences):
                assert not self.workers[worker].is_behind
                for name, keep in sequences:
                    tokens = self.kept.pop(name, [])
                    assert keep <= len(tokens), "only tokens that there are can be kept"
                    self.workers[worker].running[name] = tokens[:keep]
            case do.Move(name, source, target):
                tokens = self.workers[source].running.pop(name)
                assert self.settings.lane_after is not None
                assert len(tokens) >= self.settings.lane_after, "only stragglers go to the lane"
                assert self.workers[target].lane
                self.workers[target].running[name] = tokens
            case do.Cancel(worker, names):
                for name in names:
                    del self.workers[worker].running[name]
            case do.Train():
                self._takes(action)
            case do.Copy(version):
                assert self.training is None, "weights are copied before the next batch changes them"
                assert self.copied is None
                self.copied = version
            case do.Publish(version):
                assert (self.copied, self.travelling) == (version, None)
                assert not self.evaluating, "an evaluation is of one version"
                self.copied, self.travelling = None, version
            case do.Published(version):
                assert all(worker.version >= version for worker in self.workers.values() if not worker.is_behind)
                self.travelling = None
            case do.Evaluated():
                assert not self.evaluating
            case do.Checkpoint():
                assert self.training is None, "a checkpoint is taken between two batches"
                assert self.saving is None, "one is written at a time"
                assert action.snapshot.batch == self.next_batch
                self.saving = action
            case do.Ended():
                assert (self.training, self.saving) == (None, None), "the end waits for what is under way"
                self.ended = True

    def _takes(self, batch: do.Train) -> None:
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
                # Back by one where a worker is lost that already has the version that travels.
                assert all(later >= earlier - 1 for earlier, later in pairwise(versions))
                if not self.settings.partial_rollout:
                    assert len(set(versions)) == 1, "each sequence comes from one version"
                old = sum(batch.version - version > self.window.max_version_lag for version in versions)
                self.masked += old
                assert not old or self.settings.on_missed_deadline is OnMissedDeadline.MASK_TOKENS, "the bound"
            self.trained.append(self.positions[group])
            self.exits[Reason.TRAINED] += 1
        self.training = batch

    def _leaves(self, group: int, position: int, reason: Reason) -> None:
        assert self.positions[group] == position
        del self.held[group]
        self.unscored.pop(group, None)
        self.exits[reason] += 1
        for index in range(self.settings.group_size):
            self.finished.pop((group, index), None)
            self.kept.pop((group, index), None)
        if reason is not Reason.DISCARDED:
            self.gone.append(position)

    # What the pools do.

    def join(self, slots: int, *, lane: bool = False, newest: bool = True, behind: int = 0) -> int:
        """`newest`: with the version that travels, if one does. `behind`: with one so much older than the published one."""
        version = self.travelling if newest and self.travelling is not None else self.coordinator.version
        version = max(0, self.coordinator.version - behind) if behind else version
        number, self.joined = self.joined, self.joined + 1
        self.workers[number] = Worker(slots, version, lane, is_behind=version < self.coordinator.version)
        self.send(on.WorkerJoined(number, slots, version, lane))
        return number

    def lose(self, number: int, keep: int) -> None:
        """The first `keep` tokens of each of its sequences are at hand."""
        kept = {name: tokens[:keep] for name, tokens in self.workers.pop(number).running.items()}
        self.kept |= kept
        self.send(on.WorkerLost(number, {name: len(tokens) for name, tokens in kept.items()}))

    def leave(self, number: int, leaving: bool) -> None:
        self.workers[number].leaving = leaving
        self.send(on.WorkerLeaving(number, leaving))

    def generate(self, number: int, tokens: int) -> None:
        worker = self.workers[number]
        for generated in worker.running.values():
            generated.extend([worker.version] * tokens)

    def tell(self, number: int) -> None:
        """Births and lengths: as late as the test wants, and only as long as they are true."""
        begun = {name: list(tokens) for name, tokens in self.workers[number].running.items() if tokens}
        for name, tokens in begun.items():
            self.send(on.Started(name, tokens[0]))
        self.send(on.Progressed({name: len(tokens) for name, tokens in begun.items()}))

    def finish(self, name: SequenceId) -> None:
        worker = next(worker for worker in self.workers.values() if name in worker.running)
        tokens = worker.running.pop(name) or [worker.version]
        if name[0] in self.evaluating:
            self.evaluating[name[0]] -= 1
            if not self.evaluating[name[0]]:
                del self.evaluating[name[0]]
        else:
            self.finished[name] = tokens
            if all((name[0], index) in self.finished for index in range(self.settings.group_size)):
                self.unscored[name[0]] = None
        self.send(on.Finished(name, len(tokens)))

    def score(self, group: int, *, signal: bool = True) -> None:
        del self.unscored[group]
        self.send(on.Scored(group, signal))

    def load(self, number: int, *, next_only: bool = False) -> None:
        """The newest version, or with `next_only` the next one: a worker that is behind may have several to load."""
        worker = self.workers[number]
        newest = self.coordinator.version if self.travelling is None else self.travelling
        if worker.version < newest:
            worker.version = worker.version + 1 if next_only else newest
            worker.is_behind &= worker.version < self.coordinator.version
            self.send(on.Loaded(number, worker.version))

    def train(self) -> None:
        assert self.training is not None
        done, self.training = self.training, None
        self.send(on.Trained(done.batch))

    def save(self) -> None:
        assert self.saving is not None
        done, self.saving = self.saving, None
        self.saved.append(done.snapshot)
        self.send(on.Checkpointed(done.snapshot.batch))

    def evaluate(self, version: int, groups: int = 2, samples: int = 2) -> None:
        first, self.evaluations = EVALUATION + 100 * self.evaluations, self.evaluations + 1
        names = tuple(range(first, first + groups))
        self.evaluating = dict.fromkeys(names, samples) if version <= self.coordinator.version else {}
        self.send(on.EvaluationAsked(version, names, samples))

    @property
    def running(self) -> list[SequenceId]:
        return [name for worker in self.workers.values() for name in worker.running]

    def play(self, slots: int = 4) -> None:
        """On to the end, whatever the state: everything that can happen happens."""
        while not self.ended:
            before = len(self.log)
            if not any(not worker.lane and not worker.leaving for worker in self.workers.values()):
                self.join(slots)
            for number in list(self.workers):
                self.load(number)
            for name in self.running:
                if any(name in worker.running for worker in self.workers.values()):
                    self.finish(name)
            for group in list(self.unscored):
                if group in self.unscored:  # else a batch, filled by another's score, has discarded it
                    self.score(group)
            if self.training is not None:
                self.train()
            if self.saving is not None:
                self.save()
            assert self.ended or len(self.log) > before, "nothing can happen, and work remains"
