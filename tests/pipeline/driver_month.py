"""A long run in virtual time with the driver's real parts: `Month`, whose pool and trainer have no models, around them.

    what happens in the pool ─► reports ─► Generation ─► events ─► Coordinator.handle ─► actions ─┬─► JournalFile, flushed
               ▲                                                                                  ├─► Generation ─► commands
               └──────────────── `Month`: replicas, losses, sizes, trainer ◄──────────────────────┤
                                            metrics.jsonl ◄─ Recorder ◄─ TrainSession ◄─ assemble ┘

`Month` decides what happens and when. Its replicas report that to `Generation`, whose events alone reach the coordinator. Each
sequence has the token ids 0, 1, 2, …, so that tokens that are lost, doubled or of another sequence's length are noticed.

The channel to replicas, their supervision, weights and sampled responses are left out. Files are real; calls that wait for them
are carried out between two ticks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.manifest import TrainingSpec, load_manifest
from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.commands import Action
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.journal import JOURNALLED_ACTIONS
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.rewards.combiner import Failures
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import EndReason, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.assembly import assemble
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.generation import Generation, GenerationParts
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.measurements import PipelineMeasures, TrainingClock, evaluation_record
from qwen35_trainer.runtime.replica_channel import (
    DropSequences,
    EngineReport,
    ReplicaCommand,
    SubmitSequences,
    TakeSequences,
)
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from qwen35_trainer.runtime.reused_memory import ReusedMemory
from qwen35_trainer.runtime.rollout_pool import RolloutPool, RolloutReplica
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_session import LiveFields, NextBatch, TrainSession
from tests.pipeline.month import (
    EVALUATION_PROMPTS,
    EVALUATION_SAMPLES,
    FAILED,
    PROMPTS,
    REPLICAS,
    SAMPLES,
    WITHOUT_SIGNAL,
    Input,
    Month,
    reachable_bytes,
)

TICK_SECONDS = 0.9
"""300,000 updates then last a month."""
DATA_PROMPTS, MAX_TOKENS = 512, 4096
UPDATES_PER_PROGRESS = 4
"""Replicas report the tokens of running sequences less often than in `Month`, because that takes much of the time."""
EMPTY = dict.fromkeys(("progress", "tokens"), TokenBlock())
TOKEN_IDS, LOG_PROBS = np.arange(MAX_TOKENS, dtype=np.int32), np.zeros(MAX_TOKENS, np.float32)


@dataclass(eq=False)
class Reporter:
    """What a replica reports: `versions` has those of the tokens that it was given or has reported, by sequence."""

    number: int
    name: str
    lane: bool
    reported: float
    """Time of its last report."""
    versions: dict[SequenceId, VersionRuns] = field(default_factory=dict)
    new: set[SequenceId] = field(default_factory=set)
    """Sequences whose start is not reported yet."""

    def grow(self, name: SequenceId, length: int, version: int) -> GeneratedTokens:
        """The tokens up to `length` that have not been reported yet. They are of `version`."""
        before = len(self.versions[name])
        runs = VersionRuns(((version, length - before),) if length > before else ())
        self.versions[name] = VersionRuns.join([self.versions[name], runs])
        return tokens_of(before, runs)

    def end(self, name: SequenceId) -> GeneratedTokens:
        """All tokens of a sequence that leaves the replica."""
        self.new.discard(name)
        return tokens_of(0, self.versions.pop(name))

    def started(self, names: Iterable[SequenceId], version: int) -> dict[SequenceId, int]:
        started = {name: version for name in names if name in self.new}
        self.new -= started.keys()
        return started


class Scores:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def score_group(self, prompt: Prompt, responses: Sequence[object], *, in_trial: bool) -> Any:
        chance = self.random.random()
        if chance < FAILED:
            return tuple(CombinedScore(None, {}, {"judge": "it failed"}) for _ in responses)
        values = [0.0 if chance < WITHOUT_SIGNAL else float(index) for index, _ in enumerate(responses)]
        return tuple(CombinedScore(value, {"judge": value}, {}) for value in values)


class Ranks:
    async def train(self, batch: TrainBatch, rates: Sequence[float]) -> list[UpdateMetrics]:
        return [UpdateMetrics(0.0, 1.0, rate, int(batch.trainable.sum()), {}) for rate in rates]


class Tasks:
    """The task group of `Generation`. Its tasks, which score, wait for nothing, and are carried out by `run`."""

    def __init__(self) -> None:
        self.new: list[Coroutine[Any, Any, None]] = []

    def create_task(self, work: Coroutine[Any, Any, None]) -> None:
        self.new.append(work)

    def run(self) -> None:
        new, self.new = self.new, []
        for work in new:
            at_once(work)


def at_once(work: Coroutine[Any, Any, None]) -> None:
    """Carry out a coroutine that waits for nothing. That takes less time than an event loop."""
    with contextlib.suppress(StopIteration):
        work.send(None)
        raise AssertionError("it waits")


@dataclass
class VirtualTime:
    """In place of the module `time`."""

    now: float = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class DriverMonth(Month):
    """`clock` has to be the time of the modules of `TrainSession` and its measurements."""

    def __init__(self, updates: int, seed: int, folder: Path, clock: VirtualTime) -> None:
        self.clock, self.loop, self.tasks = clock, asyncio.new_event_loop(), Tasks()
        self.events: list[Input] = []
        self.reporters: dict[int, Reporter] = {}
        self.free_names = [f"rollout-{number}" for number in reversed(range(4 * REPLICAS))]
        self.queued: list[tuple[Reporter, EngineReport]] = []
        self.evaluated: dict[int, tuple[int, ...]] = {}  # version → groups
        super().__init__(updates, seed)
        self.spec = spec_of(updates)
        self.prompts = [
            EncodedPrompt(Prompt(f"train/{row}", "train", str(row)), np.array([row], np.int32))
            for row in range(DATA_PROMPTS)
        ]
        self.metrics = folder / "metrics.jsonl"
        self.recorder = Recorder(self.metrics)
        self.training_clock = TrainingClock(0.0)
        self.order = PromptOrder(DATA_PROMPTS, epochs=None)
        parts = GenerationParts(
            self.spec,
            self.prompts,
            self.prompts[:EVALUATION_PROMPTS],
            self.order,
            Scores(seed),
            self.recorder,
            self.training_clock,
            self.events.append,
        )
        self.generation = Generation(parts, REPLICAS)
        self.generation.pool = cast(RolloutPool, self)
        self.generation.run(cast(asyncio.TaskGroup, self.tasks))
        self.training = TrainSession(
            spec=self.spec,
            pool=cast(TrainPool, Ranks()),
            recorder=self.recorder,
            checkpoints=None,
            clock=self.training_clock,
            live=LiveFields.of(self.spec),
            exports=Exports(asyncio.Event(), 600.0),
            attempt="",
            updates_total=updates,
            _updated=0.0,
        )
        self.batch_memory = ReusedMemory()
        self.journal_file = JournalFile(folder / "journal")
        self.wait(self.journal_file.begin(self.coordinator.snapshot))

    @property
    def driver_bytes(self) -> int:
        """Size of what the driver holds, without its prompts and its settings."""
        parts = (self.coordinator, self.generation, self.training, self.journal_file, self.batch_memory)
        return reachable_bytes(parts, without=(self, self.spec, self.prompts, self.loop))

    def close(self) -> None:
        """Close the files, and read the journal. A second call does nothing."""
        if self.loop.is_closed():
            return
        self.wait(self.journal_file.close())
        self.journal = self.journal_file.path.read_bytes()
        self.recorder.close()
        self.loop.close()

    def wait[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    def step(self, inputs: list[Input]) -> None:
        events, self.events[:] = tuple(self.events), []
        super().step([*inputs, *events])
        self.tasks.run()
        if self.events:
            self.after(1, *self.events)
            self.events.clear()

    # The actions of the coordinator.

    def record(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, JOURNALLED_ACTIONS):
                self.journal_file.add(action)
        if any(isinstance(action, do.TrainGroups) for action in actions):
            self.wait(self.journal_file.flush())
            self.peak_journal = max(self.peak_journal, self.journal_file.path.stat().st_size)

    def shorten_journal(self, batch: int) -> None:
        self.wait(self.journal_file.compact(batch))

    def carry_out(self, action: Action) -> None:
        if isinstance(action, do.TrainGroups):
            self.train(action)
        super().carry_out(action)
        match action:
            case notices.GroupDispatched():
                self.generation.dispatched(action)
            case do.StartSequences():
                self.generation.start(action)
            case do.MoveSequences():
                self.generation.move(action)
            case do.CancelSequences():
                self.generation.cancel(action)
            case notices.GroupLeft(group):
                self.generation.forget(group)
            case notices.VersionPublished(version):
                now = self.clock.now
                self.training.span("publish", "publish", now - TICK_SECONDS, now, f"version {version}", version)
            case notices.VersionEvaluated(version):
                results = self.wait(self.generation.results(self.evaluated.pop(version)))
                self.recorder.append(
                    evaluation_record(results, update=self.training.update, version=version, time=self.clock.now)
                )
            case notices.EvaluationSkipped(version):
                for group in self.evaluated.pop(version):
                    self.generation.forget(group)
        queued, self.queued = self.queued, []
        for reporter, report in queued:
            self.generation.reported(cast(RolloutReplica, reporter), report)

    def train(self, order: do.TrainGroups) -> None:
        groups = self.generation.take(sorted(order.groups))
        for group in groups:
            assert group.prompt is self.prompts[self.order.prompt_index(self.positions[group.group])]
        lag = self.coordinator.settings.window.max_version_lag
        batch, age = assemble(
            groups, version=order.version, max_lag=lag, mask_old=False, updates=1, memory=self.batch_memory
        )
        expected = [TOKEN_IDS[:length] for length in batch.response_lengths.tolist()]
        assert np.array_equal(batch.responses, np.concatenate(expected)), "each token once, in order"
        at_once(self.training.train(NextBatch(batch, order.version, age, groups), self.pipeline))

    def pipeline(self) -> PipelineMeasures:
        generation, buffer = self.generation, self.coordinator.buffer
        generation.meter.workers = max(1, len(self.replicas))
        idle, rate = generation.meter.read()
        failures, generation.failures = generation.failures, Failures()
        return PipelineMeasures(buffer.counted, buffer.window.limit, idle, rate, {}, failures)

    def score(self, group: int) -> None:
        """Do nothing: `Generation` scores."""

    def evaluate(self, version: int) -> None:
        self.evaluated[version] = self.generation.evaluation()
        self.ask_for_evaluation(version, self.evaluated[version])

    # The rollout pool, as `Generation` sees it.

    def send(self, number: int, command: ReplicaCommand) -> bool:
        if number not in self.replicas:
            return False
        replica, reporter = self.replicas[number], self.reporters[number]
        match command:
            case SubmitSequences(requests):
                for request in requests:
                    kept = request.kept
                    assert len(kept) == self.tick - replica.held[request.sequence], "all tokens that there are"
                    reporter.versions[request.sequence] = kept.versions
                    reporter.new.add(request.sequence)
            case DropSequences(names):
                for name in names:
                    reporter.versions.pop(name, None)
                    reporter.new.discard(name)
            case TakeSequences(names):
                self.queued.append((reporter, self.taken(reporter, names, replica.version)))
        return True

    def taken(self, reporter: Reporter, names: Sequence[SequenceId], version: int) -> EngineReport:
        started, tokens = reporter.started(names, version), {}
        for name in names:
            reporter.grow(name, self.made(name), version)
            tokens[name] = [reporter.end(name)]
        return EngineReport(0, started=started, **(EMPTY | {"tokens": TokenBlock(tokens)}), taken=tuple(names))

    def made(self, name: SequenceId) -> int:
        """The number of tokens of a sequence. `Month` has moved it to its target already."""
        replica = self.replicas.get(self.holders[name])
        if replica is None or name not in replica.held:
            return self.available[name]
        return self.tick - replica.held[name]

    # What replicas report.

    def still_true(self, event: Input) -> bool:
        """Whether the coordinator gets the event from `Month`. It gets the events of generation from `Generation`."""
        if isinstance(event, on.VersionLoaded):  # two thirds of the events
            return super().still_true(event)
        self.clock.now = self.tick * TICK_SECONDS
        holder = self.holders.get(event.sequence, -1) if isinstance(event, on.SequenceFinished) else -1
        if not super().still_true(event):
            return False
        match event:
            case on.SequenceFinished(name, length) if holder >= 0:
                self.finished(self.reporters[holder], name, length)
                return False
            case on.ReplicaJoined(number, _, _, lane):
                self.reporters[number] = Reporter(number, self.free_names.pop(), lane, self.clock.now)
            case on.ReplicaLost(number, kept) if number in self.reporters:
                self.generation.lost(cast(RolloutReplica, self.reporters[number]))
                lost = next(each for each in reversed(self.events) if isinstance(each, on.ReplicaLost))
                assert all(lost.kept[name] == kept[name] for name in kept.keys() & lost.kept.keys())
                self.free_names.append(self.reporters.pop(number).name)
                return False
        return True

    def finished(self, reporter: Reporter, name: SequenceId, length: int) -> None:
        version = self.version_of(reporter)
        started = reporter.started([name], version)
        reporter.grow(name, length, version)
        self.report(
            reporter,
            started=started,
            tokens=TokenBlock({name: [reporter.end(name)]}),
            finished={name: EndReason.STOP},
            generated=length,
        )

    def report_progress(self) -> None:
        if self.trained % UPDATES_PER_PROGRESS:
            return
        for number, replica in self.replicas.items():
            lengths = {name: self.tick - began for name, began in replica.held.items() if self.tick > began}
            if lengths:
                self.progress(self.reporters[number], lengths, replica.version)

    def progress(self, reporter: Reporter, lengths: Mapping[SequenceId, int], version: int) -> None:
        started = reporter.started(lengths, version)
        grown = {name: [reporter.grow(name, length, version)] for name, length in lengths.items()}
        self.report(reporter, started=started, progress=TokenBlock(grown), lengths=lengths)

    def loss_of(self, number: int) -> on.ReplicaLost:
        """The replica has reported a part of its tokens before it is lost."""
        reporter, kept = self.reporters[number], {}
        for name, began in self.replicas[number].held.items():
            before = len(reporter.versions[name])
            kept[name] = self.available[name] = self.random.randint(before, max(before, self.tick - began))
        if kept:
            self.progress(reporter, kept, self.replicas[number].version)
        return on.ReplicaLost(number, kept)

    def report(self, reporter: Reporter, **contents: Any) -> None:
        interval = (reporter.reported, self.clock.now)
        reporter.reported = self.clock.now
        report = EngineReport(0, **(EMPTY | contents), intervals=(interval,))
        self.generation.reported(cast(RolloutReplica, reporter), report)

    def version_of(self, reporter: Reporter) -> int:
        """The version of the replica, which may have left with this report."""
        replica = self.replicas.get(reporter.number)
        return self.newest if replica is None else replica.version


def tokens_of(before: int, versions: VersionRuns) -> GeneratedTokens:
    part = slice(before, before + len(versions))
    return GeneratedTokens(TOKEN_IDS[part], LOG_PROBS[part], versions)


def spec_of(updates: int) -> TrainingSpec:
    changes = {
        "data.maxResponseTokens": MAX_TOKENS,
        "algorithm.groupSize": SAMPLES,
        "evaluation.samplesPerPrompt": EVALUATION_SAMPLES,
        "train.batch.promptsPerUpdate": PROMPTS,
        "train.batch.microBatchSequences": 1,
        "train.updates": updates,
    }
    example = Path(__file__).parents[2] / "examples" / "tiny-grpo.yaml"
    return load_manifest(example, [f"{name}={value}" for name, value in changes.items()]).spec
