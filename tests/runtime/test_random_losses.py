"""Random histories of replicas that report, move sequences, join and are lost, with the real coordinator and generation.

    Coordinator ─► commands ─► Generation ─► each replica's inbox ─► Replica: generates, finishes, gives back
        ▲                          │                                    │ reports, one after the other
        └──────── events ◄─────────┴────────────────────────────────────┘
                                  any of the arrows may take its time; a lost replica loses what is on its two

Laws: the tokens of a finished sequence are those that the replica which finished it has of it, from the first to the last; a sequence
continues with the first tokens that another replica had of it, and a loss leaves all that were reported; no token is trained that is too
old; in the end every batch has trained, and no table has grown.
"""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.manifest import TrainingSpec, load_manifest
from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.commands import Action
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import GeneratedTokens, SequenceRequest
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.generation import Generation, GenerationParts
from qwen35_trainer.runtime.measurements import TrainingClock
from qwen35_trainer.runtime.replica_channel import (
    DropSequences,
    EngineReport,
    ReplicaCommand,
    SubmitSequences,
    TakeSequences,
)
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from tests.operator.kube import virtual

LONG = 12
"""Tokens of the longest sequences."""
LANE_AFTER = 4


@dataclass
class Replica:
    """An engine behind its channel: commands reach it in order, and its reports reach the driver in order."""

    number: int
    lane: bool
    version: int
    name: str = "replica"
    inbox: deque[ReplicaCommand] = field(default_factory=deque)
    wire: deque[EngineReport] = field(default_factory=deque)
    held: dict[SequenceId, list[tuple[int, int]]] = field(default_factory=dict)
    """Tokens of running sequences, with their versions."""
    _reported: dict[SequenceId, int] = field(default_factory=dict)
    _outbox: dict[str, Any] = field(default_factory=dict)

    def obey(self) -> None:
        """Carry out all commands that have arrived."""
        while self.inbox:
            match self.inbox.popleft():
                case SubmitSequences(requests):
                    for request in requests:
                        self._submit(request)
                case DropSequences(names):
                    for name in names:
                        self.held.pop(name, None)
                        self._reported.pop(name, None)
                case TakeSequences(names):
                    for name in names:
                        if name in self.held:
                            self._end(name)
                            self._box("taken").append(name)

    def step(self, room: "Room", most: int) -> None:
        """Generate up to `most` tokens for each sequence. Those that are complete end."""
        self.obey()
        for name, made in list(self.held.items()):
            length = 1 + (name[0] * 7 + name[1] * 5) % LONG
            for _ in range(min(most, length - len(made))):
                if not made:
                    self._outbox.setdefault("started", {})[name] = self.version
                token, before = next(room.tokens), made[-1][0] if made else 0
                room.origin[token] = name, before, self.version
                made.append((token, self.version))
            if len(made) >= length:
                room.complete[name].append([token for token, _ in made])
                self._end(name)
                self._outbox.setdefault("finished", {})[name] = True

    def report(self) -> None:
        new = {name: made[self._reported[name] :] for name, made in self.held.items()}
        self._reported |= {name: len(made) for name, made in self.held.items()}
        progress = TokenBlock({name: [tokens_of(made)] for name, made in new.items() if made})
        lengths = {name: self._reported[name] for name in progress}
        whole = TokenBlock({name: [tokens_of(made)] for name, made in self._outbox.pop("tokens", {}).items()})
        self.wire.append(EngineReport(1, progress=progress, lengths=lengths, tokens=whole, **self._outbox))
        self._outbox = {}

    def load(self, version: int) -> None:
        self.version = max(self.version, version)

    def _submit(self, request: SequenceRequest) -> None:
        assert request.sequence not in self.held, "it runs here already"
        kept = request.kept
        self.held[request.sequence] = list(zip(kept.ids.tolist(), kept.versions.tolist(), strict=True))
        self._reported[request.sequence] = len(kept)

    def _end(self, name: SequenceId) -> None:
        self._outbox.setdefault("tokens", {})[name] = self.held.pop(name)
        del self._reported[name]

    def _box(self, key: str) -> list[SequenceId]:
        box: list[SequenceId] = self._outbox.setdefault(key, [])
        return box


class Scores:
    async def score_group(self, prompt: Prompt, responses: Any, *, in_trial: bool) -> tuple[CombinedScore, ...]:
        return tuple(CombinedScore(float(index), {}, {}) for index in range(len(responses)))


class Room:
    """Everything between the events of replicas and the trained batches."""

    def __init__(self, spec: TrainingSpec, *, partial: bool) -> None:
        self.window = Window(2, 1, 1.0, 2)
        self.batches = 4
        settings = CoordinatorSettings(
            self.window,
            group_size=2,
            batches=self.batches,
            lane_after=LANE_AFTER,
            lane_breaks_even=False,
            partial_rollout=partial,
        )
        self.coordinator = Coordinator(settings)
        self.tokens = itertools.count(1)
        self.complete: dict[SequenceId, list[list[int]]] = {}
        self.origin: dict[int, tuple[SequenceId, int, int]] = {}
        """Token → its sequence, the token before it or 0, and its version. No token is generated twice."""
        self.received: dict[tuple[int, SequenceId], int] = {}
        """How many tokens the driver has received of a sequence from a replica, or given to it."""
        self.replicas: dict[int, Replica] = {}
        self.numbers = itertools.count()
        self.published, self.copied = 0, 0
        self.inputs: list[on.Event] = []
        self.decided: deque[Any] = deque()
        self.trained: list[int] = []
        self.ended = False
        prompts = [
            EncodedPrompt(Prompt(f"train/{row}", "train", str(row)), np.array([row], np.int32)) for row in range(8)
        ]
        recorder: Any = SimpleNamespace(append=lambda record: None)
        parts = GenerationParts(
            spec,
            prompts,
            [],
            PromptOrder(8, epochs=None, shuffle=False),
            Scores(),
            recorder,
            TrainingClock(0.0),
            self.inputs.append,
        )
        self.generation: Any = Generation(parts, 1)
        self.generation.pool = self

    # The pool, as generation sees it.

    def send(self, number: int, command: ReplicaCommand) -> bool:
        if number not in self.replicas:
            return False
        self.replicas[number].inbox.append(command)
        if isinstance(command, SubmitSequences):
            for request in command.requests:
                ids, versions = request.kept.ids.tolist(), request.kept.versions.tolist()
                for before, token, version in zip([0, *ids], ids, versions, strict=False):
                    assert self.origin[token] == (request.sequence, before, version)
                self.received[number, request.sequence] = len(ids)
        return True

    # What may happen.

    def join(self, *, lane: bool) -> None:
        if sum(replica.lane == lane for replica in self.replicas.values()) < 2:
            number = next(self.numbers)
            self.replicas[number] = Replica(number, lane, self.published)
            self.inputs.append(on.ReplicaJoined(number, 4, self.published, lane))

    def lose(self, replica: Replica) -> None:
        del self.replicas[replica.number]
        held = {name: each.holder for name, each in self.generation._sequences.items()}
        self.generation.lost(replica)
        [lost] = [
            event for event in self.inputs if isinstance(event, on.ReplicaLost) and event.replica == replica.number
        ]
        assert lost.kept == {name: self.received[held[name], name] for name in lost.kept}

    def deliver(self, replica: Replica) -> None:
        if replica.wire:
            report = replica.wire.popleft()
            self.received |= {(replica.number, name): length for name, length in report.lengths.items()}
            self.generation.reported(replica, report)

    def load(self, replica: Replica) -> None:
        if replica.version < self.published:
            replica.obey()
            replica.load(self.published)
            self.inputs.append(on.VersionLoaded(replica.number, self.published))

    def decide(self) -> None:
        inputs, self.inputs[:] = tuple(self.inputs), []
        self.decided += self.coordinator.handle(*inputs)

    def carry_out(self) -> None:
        while self.decided:
            action = self.decided.popleft()
            if not self._generate(action):
                self._train_or_publish(action)

    def _generate(self, action: Action) -> bool:
        """Carry out what concerns generation. Returns whether the action does."""
        match action:
            case notices.GroupDispatched():
                self.complete |= {(action.group, index): [] for index in range(2)}
                self.generation.dispatched(action)
            case do.StartSequences():
                self.generation.start(action)
            case do.MoveSequences():
                self.generation.move(action)
            case do.CancelSequences():
                self.generation.cancel(action)
            case notices.GroupLeft(group):
                self.generation.forget(group)
            case _:
                return False
        return True

    def _train_or_publish(self, action: Action) -> None:
        match action:
            case do.TrainGroups():
                self._train(action)
            case do.CopyWeights(version):
                self.inputs.append(on.WeightsCopied(version))
            case do.PublishWeights(version):
                self.published = version
            case do.SaveCheckpoint(snapshot):
                self.inputs.append(on.CheckpointCompleted(snapshot.batch))
            case notices.RunEnded():
                self.ended = True

    def _train(self, order: do.TrainGroups) -> None:
        for group in self.generation.take(order.groups):
            for sequence in group.sequences:
                assert sequence.tokens.ids.tolist() in self.complete[sequence.sequence]
                assert order.version - min(sequence.tokens.versions.tolist()) <= self.window.max_version_lag
            self.trained.append(int(group.prompt.token_ids[0]))
        self.inputs.append(on.BatchTrained(order.batch))


def tokens_of(made: list[tuple[int, int]]) -> GeneratedTokens:
    ids, versions = np.array(made, np.int32).reshape(-1, 2).T
    return GeneratedTokens(ids.copy(), np.zeros(len(made), np.float32), VersionRuns.of(versions))


PICKS = st.integers(0, 3)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), PICKS, st.integers(1, 6)),
        st.tuples(st.sampled_from(["obey", "report", "deliver", "deliver", "load"]), PICKS, st.just(0)),
        st.tuples(st.sampled_from(["decide", "carry out", "carry out"]), st.just(0), st.just(0)),
        st.tuples(st.just("lose"), PICKS, st.just(0)),
        st.tuples(st.just("join"), st.integers(0, 1), st.just(0)),
    ),
    max_size=80,
)


def act(room: Room, kind: str, pick: int, amount: int) -> None:
    if kind == "decide":
        room.decide()
    elif kind == "carry out":
        room.decide()
        room.carry_out()
    elif kind == "join":
        room.join(lane=bool(pick))
    elif room.replicas:
        replica = list(room.replicas.values())[pick % len(room.replicas)]
        match kind:
            case "step":
                replica.step(room, amount)
            case "obey":
                replica.obey()
            case "report":
                replica.report()
            case "deliver":
                room.deliver(replica)
            case "load":
                room.load(replica)
            case "lose":
                room.lose(replica)


async def end(room: Room) -> None:
    """From now on nothing is lost, and everything arrives."""
    for _ in range(200):
        room.decide()
        room.carry_out()
        if room.ended:
            return
        room.join(lane=False)
        for replica in list(room.replicas.values()):
            room.load(replica)
            replica.step(room, 2)
            replica.report()
            while replica.wire:
                room.deliver(replica)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    raise AssertionError(f"the run does not end: {len(room.trained)} groups have trained")


@pytest.fixture(scope="module")
def spec(write, tmp_path_factory) -> TrainingSpec:
    return load_manifest(
        write(tmp_path_factory.mktemp("random"), {"algorithm.groupSize": 2, "train.batch.microBatchSequences": 8})
    ).spec


@pytest.mark.parametrize("partial", [True, False])
@given(acts=ACTS)
def test_whatever_happens_to_replicas_sequences_are_whole_and_every_prompt_trains(spec, partial, acts):
    async def play() -> None:
        room = Room(spec, partial=partial)
        async with asyncio.TaskGroup() as tasks:
            room.generation.run(tasks)
            room.join(lane=False)
            room.join(lane=True)
            for each in acts:
                act(room, *each)
                await asyncio.sleep(0)
            await end(room)
        assert sorted(room.trained) == list(range(8))
        generation = room.generation
        assert not any((generation._groups, generation._sequences, generation._progress))
        assert {replica for _, replica in generation._taking} <= set(room.replicas)

    virtual.run(play())
