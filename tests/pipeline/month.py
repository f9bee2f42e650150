"""A long run in virtual time: a pool and a trainer without models drive the coordinator and the journal.

    inputs of a tick ─► Coordinator.handle ─► actions ─┬─► journal: bytes, compacted after each checkpoint
          ▲                                            ├─► FakePool: 64 replicas and a lane, losses, other sizes
          └────────────── later ticks ◄────────────────┴─► trainer: copies, checkpoints, evaluations

Time is counted in ticks; a token takes one. `driver_month.py` is the same run with the driver's real parts.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.commands import Action
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.events import Event, SequenceId
from qwen35_trainer.pipeline.journal import JOURNALLED_ACTIONS, JournalBase, compact, encode
from qwen35_trainer.pipeline.requests import EvaluateVersion, Request, TakeCheckpoint
from qwen35_trainer.pipeline.window import Window

type Input = Event | Request

PROMPTS, SAMPLES, REPLICAS, SLOTS, LANES = 4, 4, 64, 4, 2
UPDATES_PER_LOSS, UPDATES_PER_SIZE, UPDATES_PER_CHECKPOINT, UPDATES_PER_EVALUATION = 50, 400, 100, 97
STRAGGLER_TOKENS = 25
EVALUATION, EVALUATION_PROMPTS, EVALUATION_SAMPLES = 1 << 40, 3, 2
FAILED, WITHOUT_SIGNAL = 0.002, 0.03
"""Shares of the groups that fail, and that fail or whose rewards do not differ."""


def settings(updates: int) -> CoordinatorSettings:
    window = Window(PROMPTS, 1, 2.0, 4)
    return CoordinatorSettings(window, SAMPLES, updates, dynamic_sampling=True, lane_after=STRAGGLER_TOKENS)


@dataclass
class FakeReplica:
    slots: int
    version: int
    lane: bool = False
    leaving: bool = False
    held: dict[SequenceId, int] = field(default_factory=dict)
    """Sequence → the tick at which it would have started, had it computed all its tokens here."""


class Month:
    """`updates` batches. `turns` counts the turns of each prompt, `peak_journal` is the journal's largest size in bytes."""

    def __init__(self, updates: int, seed: int) -> None:
        self.updates, self.random = updates, random.Random(seed)
        self.coordinator = Coordinator(settings(updates))
        self.tick = self.trained = self.joined = self.joining = self.lost = self.peak_journal = 0
        self.later: defaultdict[int, list[Input]] = defaultdict(list)
        self.replicas: dict[int, FakeReplica] = {}
        self.resizes = True
        self.newest = 0  # version
        self.holders: dict[SequenceId, int] = {}
        self.lengths: dict[SequenceId, int] = {}
        self.available: dict[SequenceId, int] = {}  # tokens of sequences without a replica
        self.unfinished: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        self.turns = bytearray()
        self.journal = encode(JournalBase(self.coordinator.snapshot))
        self.evaluations: Counter[str] = Counter()
        self.ended = False
        for _ in range(REPLICAS):
            self.join(0)
        for _ in range(LANES):
            self.join(0, lane=True)

    def run(self, until: int | None = None) -> None:
        """On to the end, or until this number of updates has trained."""
        while not self.ended and (until is None or self.trained < until):
            if not self.later:
                raise AssertionError("nothing can happen, and work remains")
            self.tick += 1
            if inputs := self.later.pop(self.tick, None):
                self.step([each for each in inputs if self.still_true(each)])

    def step(self, inputs: list[Input]) -> None:
        actions = self.coordinator.handle(*inputs)
        self.record(actions)
        for action in actions:
            self.carry_out(action)

    def after(self, ticks: int, *inputs: Input) -> None:
        self.later[self.tick + ticks] += inputs

    # The actions of the coordinator.

    def record(self, actions: Sequence[Action]) -> None:
        self.journal += b"".join(encode(action) for action in actions if isinstance(action, JOURNALLED_ACTIONS))
        self.peak_journal = max(self.peak_journal, len(self.journal))

    def carry_out(self, action: Action) -> None:  # noqa: C901, one case for each action
        match action:
            case notices.GroupDispatched(group, position):
                self.positions[group], self.unfinished[group] = position, SAMPLES
                self.turns.extend(bytes(max(0, position + 1 - len(self.turns))))
            case notices.GroupLeft(group, position):
                self.leaves(group)
            case do.StartSequences(number, sequences):
                for name, keep in sequences:
                    self.start(name, number, keep)
            case do.MoveSequences(source, target, names):
                for name in names:
                    self.move(name, source, target)
            case do.CancelSequences(number, names):
                for name in names:
                    if number in self.replicas:  # else the coordinator learns of its loss later
                        self.replicas[number].held.pop(name, None)
            case do.TrainGroups(batch, _, groups):
                for group in groups:
                    self.leaves(group)
                self.after(2, on.BatchTrained(batch))
            case do.CopyWeights(version):
                self.after(1, on.WeightsCopied(version))
            case do.PublishWeights(version):
                self.newest = version
                for number in self.replicas:
                    self.after(self.random.randint(1, 3), on.VersionLoaded(number, version))
            case do.SaveCheckpoint(snapshot):
                self.after(3, on.CheckpointCompleted(snapshot.batch))
            case notices.VersionEvaluated() | notices.EvaluationSkipped():
                self.evaluations[type(action).__name__] += 1
            case notices.RunEnded():
                self.ended = True

    def start(self, name: SequenceId, number: int, keep: int) -> None:
        assert keep == self.available.pop(name, keep), "all tokens that there are, no more"
        replica = self.replicas.get(number)
        if replica is None:  # it is lost, and the coordinator learns that later
            self.available[name] = keep
            return
        replica.held[name] = self.tick - keep
        assert len(replica.held) <= replica.slots
        if name not in self.lengths:
            self.lengths[name] = 1 + int(self.random.lognormvariate(1.5, 0.9))
        if name[0] >= EVALUATION:
            self.unfinished.setdefault(name[0], EVALUATION_SAMPLES)
        self.holders[name] = number
        self.after(max(1, self.lengths[name] - keep), on.SequenceFinished(name, self.lengths[name]))

    def move(self, name: SequenceId, source: int, target: int) -> None:
        """From a source that is lost, the sequence continues with the tokens that are available."""
        if source in self.replicas:
            self.start(name, target, self.tick - self.replicas[source].held.pop(name))
        else:
            self.start(name, target, self.available[name])

    def leaves(self, group: int) -> None:
        self.turns[self.positions.pop(group)] += 1
        self.unfinished.pop(group, None)
        for index in range(SAMPLES):
            self.forget((group, index))

    def forget(self, name: SequenceId) -> None:
        for table in (self.holders, self.lengths, self.available):
            table.pop(name, None)

    # What the pools report.

    def still_true(self, event: Input) -> bool:
        """Whether a scheduled report is made: its sequence may have moved to another replica or left meanwhile."""
        match event:
            case on.SequenceFinished(name):
                return self.finishes(name)
            case on.ReplicaJoined(number, slots, version, lane):
                self.replicas[number] = FakeReplica(slots, version, lane)
                self.joining -= not lane
                if version < self.newest:
                    self.after(2, on.VersionLoaded(number, self.newest))
            case on.VersionLoaded(number, version) if number in self.replicas:
                self.replicas[number].version = max(version, self.replicas[number].version)
            case on.BatchTrained():
                self.batch_trained()
            case on.CheckpointCompleted(batch):
                self.shorten_journal(batch)
        return True

    def finishes(self, name: SequenceId) -> bool:
        replica = self.replicas.get(self.holders.get(name, -1))
        if replica is None or name not in replica.held or self.tick - replica.held[name] < self.lengths[name]:
            return False
        group = name[0]
        del replica.held[name]
        self.forget(name)
        self.retire_if_empty(replica)
        self.unfinished[group] -= 1
        if not self.unfinished[group]:
            del self.unfinished[group]
            if group < EVALUATION:
                self.score(group)
        return True

    def score(self, group: int) -> None:
        chance = self.random.random()
        self.after(1, on.GroupFailed(group) if chance < FAILED else on.GroupScored(group, chance > WITHOUT_SIGNAL))

    def shorten_journal(self, batch: int) -> None:
        self.journal = compact(self.journal, batch)

    def batch_trained(self) -> None:
        self.trained += 1
        if self.trained % UPDATES_PER_LOSS == 0:
            self.lose_some(1 if self.random.random() < 0.8 else 4)
        if self.resizes and self.trained % UPDATES_PER_SIZE == 0:
            self.resize(self.random.randint(REPLICAS // 2, REPLICAS))
        if self.trained % UPDATES_PER_CHECKPOINT == 0:
            self.after(1, TakeCheckpoint())
        if self.trained % UPDATES_PER_EVALUATION == 0:
            self.evaluate(self.trained - self.random.randint(0, 2))
        self.report_progress()

    def evaluate(self, version: int) -> None:
        first = EVALUATION + 10 * self.trained
        self.ask_for_evaluation(version, tuple(range(first, first + EVALUATION_PROMPTS)))

    def ask_for_evaluation(self, version: int, groups: tuple[int, ...]) -> None:
        self.evaluations["asked"] += 1
        self.after(1, EvaluateVersion(version, groups, EVALUATION_SAMPLES))

    def report_progress(self) -> None:
        running = {
            name: max(1, self.tick - began)
            for replica in self.replicas.values()
            for name, began in replica.held.items()
            if self.tick > began
        }
        self.after(1, on.SequencesProgressed(running))

    # The rollout pool.

    def join(self, age: int, *, lane: bool = False) -> None:
        number, self.joined = self.joined, self.joined + 1
        self.joining += not lane
        version = max(0, self.newest - age)
        self.after(1 + 4 * age, on.ReplicaJoined(number, SLOTS, version, lane, None if lane else 2_000))

    def lose_some(self, count: int) -> None:
        """Replicas of one node: the coordinator learns of their loss together. Other ones replace them, with older weights."""
        for number in self.random.sample(sorted(self.replicas), count):
            self.after(1, self.loss_of(number))
            replica = self.replicas.pop(number)
            if not replica.leaving:
                self.join(self.random.randint(0, 2), lane=replica.lane)
            self.lost += 1

    def loss_of(self, number: int) -> on.ReplicaLost:
        kept = {}
        for name, began in self.replicas[number].held.items():
            kept[name] = self.available[name] = self.random.randint(0, max(0, self.tick - began))
        return on.ReplicaLost(number, kept)

    def resize(self, size: int) -> None:
        pool = [number for number, replica in self.replicas.items() if not replica.lane and not replica.leaving]
        for number in pool[max(0, size - self.joining) :]:
            self.replicas[number].leaving = True
            self.after(1, on.ReplicaLeaving(number))
        for _ in range(size - self.joining - len(pool)):
            self.join(0)
        for replica in list(self.replicas.values()):
            self.retire_if_empty(replica)

    def retire_if_empty(self, replica: FakeReplica) -> None:
        if replica.leaving and not replica.held:
            number = next(each for each, other in self.replicas.items() if other is replica)
            del self.replicas[number]
            self.after(2, on.ReplicaLost(number))


def reachable_bytes(root: object, without: Iterable[object] = ()) -> int:
    """Size of all objects that can be reached from `root`, without code and without the objects of `without`."""
    seen = {id(each) for each in without}
    objects, total = [root], 0
    while objects:
        each = objects.pop()
        if id(each) in seen or isinstance(each, ModuleType | FunctionType | type):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        objects += gc.get_referents(each)
    return total
