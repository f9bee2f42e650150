"""Measures the driver: its processor time per finished sequence, and its memory. Prints one JSON object.

    Ray actors of FakeReplica ◄── real channel ──► this process: pool, generation, coordinator, journal, scoring, assembly

    python -m benchmarks.driver [--replicas 8] [--slots 256] [--seconds 60]

The replicas are processes with the real engine thread around an engine that only counts: each running sequence gets
50 tokens per second. Everything in this process is what a driver runs, on the event loop that Ray gives to it, except that a batch, which goes to
the object store, trains immediately, and publications have no weights. To measure long responses within minutes, all clocks of the replicas run `speed` times faster, and every interval of
the protocol is shorter by the same factor, so that the number of calls and reports for each sequence is that of real time.
Weights are announced as with shared memory; in Ray's object store, each publication costs one call through Ray for each replica.

processor   microseconds of this process, Ray's threads included, per finished sequence of 2,000 and of 32,000 tokens; and
            what remains without the processor time that this process takes while it is connected to Ray and does nothing. Copying
            batches to the object store, in a thread, is part of both, and is also given alone
slowdown    how many times longer a fixed piece of Python takes between the driver's work than again and again on its own,
            because the processor has slept or is shared. That piece uses hardly any memory, so the number does not contain
            what the driver's own memory costs after it has left the caches
memory      resident bytes of this process with 64 × 128 sequences of 32,000 tokens, all of them unfinished
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import ray
import uvloop
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from qwen35_trainer.contract.shared_names import INLINE_ANSWERS
from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.engines.batch_division import ONE_SHARE
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.manifest import TrainingSpec, load_manifest
from qwen35_trainer.pipeline.commands import StartSequences
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.notices import GroupDispatched
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.rewards.reward import GroupScorer
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardsSetup, usable_cores
from qwen35_trainer.rewards.scoring import Scoring
from qwen35_trainer.rollout.rollout_engine import (
    Completed,
    EndReason,
    GeneratedTokens,
    RolloutEngine,
    SequenceRequest,
    StepOutput,
)
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.rollout.vllm_environment import reuse_freed_tensors
from qwen35_trainer.runtime import rollout_worker
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.generation import Generation, GenerationParts
from qwen35_trainer.runtime.job import QUEUE_SHARE, coordinator_settings, replica_slots
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.loop import TrainingLoop
from qwen35_trainer.runtime.measurements import TrainingClock
from qwen35_trainer.runtime.process import collect_seldom
from qwen35_trainer.runtime.replica_channel import EngineReport, LoadWeights, ReplicaChannel
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from qwen35_trainer.runtime.response_samples import Sampler
from qwen35_trainer.runtime.rollout_pool import PoolLimits, RolloutPool, RolloutReplica
from qwen35_trainer.runtime.rollout_worker import RolloutWorker
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_session import LiveFields, TrainSession
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.published import PublishedWeights
from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.weight_manifest import WeightLayout, WeightManifest

TOKENS_PER_SECOND = 50.0
"""Of one sequence: what a replica of one GPU gives a model of some 10 to 30 billion parameters at 128 to 256 sequences."""
STEP_SECONDS = 0.02
IDLE_SECONDS = 10.0
REFERENCE_STEPS, REFERENCE_SECONDS = 5_000, 1.0
"""Size of the fixed piece of Python, about 0.2 ms, and the interval at which it runs during a measurement.

Its processor time is subtracted, but not that of waking up, which takes 0.1 to 0.2 ms each time.
"""
GROUP, PROMPT_TOKENS, ANSWERS = 16, 200, 64
VOCABULARY = 50_000
INTERVALS = ("PROGRESS_SECONDS", "MIN_GATHER_SECONDS", "MAX_GATHER_SECONDS", "MAX_REPORT_SECONDS")
"""Constants of `rollout_worker` that a faster clock shortens."""


@dataclass
class CountingEngine:
    """A rollout engine that gives every running sequence random tokens at a constant rate, until it has `length` tokens."""

    slots: int
    length: int
    speed: float
    version: int = 0
    _running: dict[SequenceId, list[float]] = field(default_factory=dict)  # tokens, reported tokens, length
    _waiting: deque[SequenceRequest] = field(default_factory=deque)
    _random: np.random.Generator = field(default_factory=np.random.default_rng)
    _stepped: float = field(default_factory=time.monotonic)
    _first: bool = True

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def token_room(self) -> int:
        return self.slots * self.length

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[Completed, ...]:
        self._waiting.extend(requests)
        return ()

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        names = set(sequences)
        self._waiting = deque(request for request in self._waiting if request.sequence not in names)
        return {name: self._tokens(int(self._running.pop(name)[0])) for name in names & self._running.keys()}

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        grown = {}
        for name, state in self._running.items():
            if new := int(state[0]) - int(state[1]):
                grown[name], state[1] = self._tokens(new), int(state[0])
        return grown

    def receive(self, weights: Mapping[str, Any], version: int) -> None:
        """Take nothing: the engine only counts."""

    def commit(self, version: int) -> None:
        self.version = version

    def discard(self) -> None:
        """Drop nothing: `receive` takes nothing."""

    def settle(self) -> StepOutput:
        return StepOutput()

    def probe(self, sequences: Sequence[NDArray[np.int32]]) -> None:
        """Compute nothing: publications here have no probe."""

    def sleep(self) -> MemoryChange:
        """Give back nothing: the engine has no weights."""
        return MemoryChange(0, 0)

    def wake(self) -> None:
        """Do nothing: the engine has given nothing back."""

    def checksums(self) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self) -> StepOutput:
        started: dict[SequenceId, int] = {}
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting.popleft()
            # The first sequences are as far as if generation had run for a long time, so that ends are spread evenly.
            done = self._random.uniform(0, self.length) if self._first else 0.0
            self._running[request.sequence] = [len(request.kept), len(request.kept), max(1.0, self.length - done)]
            started[request.sequence] = self.version
        self._first = self._first and not self._running
        time.sleep(STEP_SECONDS)
        now = time.monotonic()
        grown = (now - self._stepped) * TOKENS_PER_SECOND * self.speed
        self._stepped = now
        for state in self._running.values():
            state[0] = min(state[0] + grown, state[2])
        ended = [name for name, state in self._running.items() if state[0] >= state[2]]
        finished = [Completed(name, self._tokens(int(self._running.pop(name)[2])), EndReason.STOP) for name in ended]
        return StepOutput(tuple(finished), started, int(grown * len(self._running)))

    def _tokens(self, count: int) -> GeneratedTokens:
        ids = self._random.integers(0, VOCABULARY, count, np.int32)
        return GeneratedTokens(ids, np.zeros(count, np.float32), VersionRuns(((self.version, count),) if count else ()))


class FakeReplica(RolloutWorker):
    """Ray actor: a rollout worker whose engine counts, and whose clock runs `speed` times faster."""

    def __init__(self, name: str, slots: int, length: int, speed: float, logs: Path) -> None:
        unused: Any = None
        super().__init__(unused, name, life=(), end_token=0, vocabulary=0, base=logs, threads=0, logs=logs)
        self._build = lambda: CountingEngine(slots, length, speed)  # type: ignore[method-assign]
        for interval in INTERVALS:
            setattr(rollout_worker, interval, getattr(rollout_worker, interval) / speed)

    def use_threads(self, threads: int) -> None:
        """Do not import torch."""

    def _limiting_room(self, engine: RolloutEngine) -> None:
        """Return None: only slots limit the engine."""

    async def _load_arrived(self) -> None:
        while True:
            arrived = await self._arrived.get()
            if isinstance(arrived, LoadWeights):
                await asyncio.wrap_future(self._running.commit(arrived.weights.manifest.version))


@dataclass
class FakeTrainPool:
    """A train pool of one rank, which takes no time to train."""

    copying: float = 0.0
    """Processor time, in seconds, of copying batches to the object store."""

    async def train(self, batch: TrainBatch, rates: Sequence[float]) -> list[UpdateMetrics]:
        await asyncio.to_thread(self._put, batch)
        return [UpdateMetrics(0.0, 0.0, rate, 0, {}) for rate in rates]

    async def publication(self, version: int, needed: frozenset[int] = frozenset()) -> PublishedWeights:
        return PublishedWeights(WeightManifest(version, WeightLayout((), 0), ()), SegmentHandle("", 0, ()))

    def _put(self, batch: TrainBatch) -> None:
        """Do what `TrainPool` does with a batch before it calls the rank."""
        began = time.thread_time()
        for share in ONE_SHARE.shares_of(batch):
            ray.put(share)
        self.copying += time.thread_time() - began


class CountingChannel(ReplicaChannel):
    """A channel that counts its calls, those over the connection and those through Ray."""

    counts: Counts

    async def _call(self, method: str, *arguments: object, act: str, seconds: float) -> Any:  # noqa: ANN401  # a worker's result
        self.counts.calls += 1
        return await super()._call(method, *arguments, act=act, seconds=seconds)

    async def _call_through_ray(self, method: str, *arguments: object, act: str, seconds: float) -> Any:  # noqa: ANN401  # as above
        self.counts.calls_through_ray += 1
        return await super()._call_through_ray(method, *arguments, act=act, seconds=seconds)


@dataclass(frozen=True)
class Load:
    """The work of the replicas: responses of `tokens` tokens, on clocks that run `speed` times faster."""

    tokens: int
    speed: float
    replicas: int
    slots: int

    @property
    def prompts_per_update(self) -> int:
        """A batch is a third of the window, and the window fills all slots and queues."""
        return max(1, round(self.replicas * self.slots * (1 + QUEUE_SHARE) / GROUP / 3))


@dataclass
class Counts:
    """Counts of events in a window of time."""

    finished: int = 0
    tokens: int = 0
    reports: int = 0
    parts: int = 0
    """Number of times that a report contained tokens of a sequence: new ones while it ran, and all at its end."""
    calls: int = 0
    """Number of calls of replicas: `exchange`, each of which returns a report, and `obey`."""
    calls_through_ray: int = 0
    """Number of those calls that traveled through Ray instead of over the connection."""


class CountingGeneration(Generation):
    """Generation that counts reports, and what they contain."""

    counts: Counts

    def reported(self, replica: RolloutReplica, report: EngineReport) -> None:
        self.counts.reports += 1
        self.counts.finished += len(report.finished)
        self.counts.parts += len(report.progress) + len(report.tokens)
        self.counts.tokens += report.generated
        super().reported(replica, report)


def spec_of(load: Load) -> TrainingSpec:
    """Return the spec of the demo with the sizes of a load."""
    changes = {
        "data.maxResponseTokens": load.tokens + load.tokens // 4,
        "data.maxPromptTokens": PROMPT_TOKENS,
        "algorithm.groupSize": GROUP,
        "rollout.maxSequencesPerReplica": load.slots,
        "train.batch.promptsPerUpdate": load.prompts_per_update,
        "train.batch.microBatchSequences": 1,
        "train.updates": 10_000,
        "async.stalenessThreshold": 2.0,
        "async.maxVersionLag": 8,
        "evaluation.everyUpdates": 0,
        "checkpoint.everyUpdates": 100_000,
    }
    example = Path(__file__).parents[1] / "examples" / "tiny-grpo.yaml"
    return load_manifest(example, [f"{name}={value}" for name, value in changes.items()]).spec


def tokenizer_of() -> PreTrainedTokenizerFast:
    """Return a tokenizer of VOCABULARY words of letters."""
    words = {"".join(chr(97 + int(digit)) for digit in str(index)): index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")))


def reference() -> float:
    """Return the processor time, in seconds, of a fixed piece of Python."""
    started, total = time.thread_time(), 0
    for number in range(REFERENCE_STEPS):
        total += number
    return time.thread_time() - started


async def references(times: list[float]) -> None:
    """Append the time of the fixed piece of Python to `times` at intervals of REFERENCE_SECONDS."""
    while True:
        await asyncio.sleep(REFERENCE_SECONDS)
        times.append(reference())


def idle_share(seconds: float) -> float:
    """Return the share of a processor that this process takes while it is connected to Ray and does nothing."""
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


async def run(load: Load, folder: Path, warm: float, seconds: float, idle: float, rest: float) -> dict[str, Any]:
    """Run a driver under a load.

    warm, seconds: real time before and during the measurement. idle: from `idle_share`. rest: the time of `reference` on its own.
    """
    spec, counts, pool = spec_of(load), Counts(), FakeTrainPool()
    data = [
        EncodedPrompt(Prompt(f"p/{n}", "p", "text", "1"), np.arange(PROMPT_TOKENS, dtype=np.int32))
        for n in range(ANSWERS)
    ]
    setup = RewardsSetup.of(spec.rewards, spec.data.train, folder)
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    with Recorder(folder / "metrics.jsonl", []) as recorder:
        async with Scoring(setup, ProcessLimits.of(usable_cores())) as scoring:
            await scoring.open(ResponseDecoder.of(tokenizer_of()))
            clock = TrainingClock(time.time())
            order = PromptOrder(len(data), seed=0, epochs=None, shuffle=False)
            parts = GenerationParts(spec, data, [], order, scoring, recorder, clock, inbox.put_nowait)
            generation = CountingGeneration(parts, load.replicas)
            generation.counts = counts
            options: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}  # as in `site.worker_options`
            actor = ray.remote(**options)(FakeReplica)

            def spawn(number: int, name: str, lane: bool) -> RolloutReplica:
                handle = actor.remote(name, load.slots, load.tokens, load.speed, folder)
                replica = RolloutReplica(number, name, handle, lane)
                replica.channel = channel = CountingChannel(handle, name)
                channel.counts = counts
                return replica

            slots = replica_slots(spec)
            generation.pool = RolloutPool(
                spawn, generation, PoolLimits(slots, 600.0, 600.0, 600.0), target=load.replicas, minimum=load.replicas
            )
            stop = asyncio.Event()
            training = TrainSession(
                spec=spec, pool=cast(TrainPool, pool), recorder=recorder, checkpoints=None, clock=clock,
                live=LiveFields.of(spec), exports=Exports(stop, 600.0), attempt="benchmark", updates_total=10_000,
            )  # fmt: skip
            loop = TrainingLoop(
                coordinator=Coordinator(coordinator_settings(spec, 10_000)), generation=generation, training=training,
                journal=JournalFile(folder / "journal"), inbox=inbox, stop=stop,
                sampler=Sampler(folder / "samples.jsonl", ResponseDecoder.of(tokenizer_of())), evaluates=False,
            )  # fmt: skip
            running = asyncio.create_task(loop.run(await pool.publication(0), []))
            await asyncio.wait({running}, timeout=warm)
            times: list[float] = []
            before, started, updates, copied = replace(counts), time.process_time(), training.update, pool.copying
            referring = asyncio.create_task(references(times))
            await asyncio.wait({running}, timeout=seconds)
            referring.cancel()
            spent = time.process_time() - started - sum(times)
            if running.done():
                running.result()
            after, copying = replace(counts), pool.copying - copied
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finished = after.finished - before.finished
    return {
        "responseTokens": load.tokens,
        "replicas": load.replicas,
        "slotsPerReplica": load.slots,
        "finished": finished,
        "updates": training.update - updates,
        "tokensPerSecond": round((after.tokens - before.tokens) / seconds),
        "reportsPerSequence": round((after.reports - before.reports) / finished, 3) if finished else None,
        "callsPerSequence": round((after.calls - before.calls) / finished, 3) if finished else None,
        "callsThroughRay": after.calls_through_ray - before.calls_through_ray,
        "partsPerSequence": round((after.parts - before.parts) / finished, 1) if finished else None,
        "processorMicrosecondsPerSequence": round(spent / finished * 1e6, 1) if finished else None,
        "copyingMicrosecondsPerSequence": round(copying / finished * 1e6, 1) if finished else None,
        "withoutIdleMicroseconds": round((spent - idle * seconds) / finished * 1e6, 1) if finished else None,
        "slowdown": round(statistics.median(times) / rest, 2),
        "processorShare": round(spent / seconds, 3),
        "idleShare": round(idle, 4),
        "runningSequences": loop.coordinator.running,
    }


class SilentPool:
    """A rollout pool that takes commands and does nothing."""

    def send(self, number: int, command: object) -> bool:
        """Ignore a command."""
        return True


def memory(replicas: int, slots: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Measure the resident memory of this process with all sequences at their last token, reported in 100 parts."""
    before = psutil.Process().memory_info().rss
    load = Load(tokens, 1.0, replicas, slots)
    data = [EncodedPrompt(Prompt("p/0", "p", "text", "1"), np.arange(PROMPT_TOKENS, dtype=np.int32))]
    order = PromptOrder(1, seed=0, epochs=None, shuffle=False)
    with Recorder(folder / "metrics.jsonl", []) as recorder:
        unused, clock = cast(GroupScorer, None), TrainingClock(0.0)
        generation = Generation(
            GenerationParts(spec_of(load), data, [], order, unused, recorder, clock, lambda event: None), replicas
        )
        generation.pool = cast(RolloutPool, SilentPool())
        groups = range(replicas * slots // GROUP)
        names = {r: [(g, i) for g in groups if g % replicas == r for i in range(GROUP)] for r in range(replicas)}
        for group in groups:
            generation.dispatched(GroupDispatched(group, group))
        for replica, held in names.items():
            generation.start(StartSequences(replica, tuple((name, 0) for name in held)))
        part = GeneratedTokens(
            np.ones(tokens // 100, np.int32), np.zeros(tokens // 100, np.float32), VersionRuns(((0, tokens // 100),))
        )
        for number in range(1, 101):
            for replica, held in names.items():
                block = TokenBlock({name: [part] for name in held})
                lengths = dict.fromkeys(held, number * len(part))
                source = SimpleNamespace(number=replica, name=f"rollout-{replica}")
                generation.reported(cast(RolloutReplica, source), EngineReport(number, progress=block, lengths=lengths))
        grown = psutil.Process().memory_info().rss - before
    return {"sequences": replicas * slots, "tokens": tokens, "residentGigabytes": round(grown / 1e9, 2)}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Processor time and memory of the driver.")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=45.0, help="length of each measurement [default: 45]")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2_000, 32_000])
    arguments = parser.parse_args()
    reuse_freed_tensors()  # as in a driver
    collect_seldom()
    gc.freeze()  # also as in a driver: garbage collection skips imported modules
    with tempfile.TemporaryDirectory(prefix="driver-") as folder:
        held = memory(64, 128, 32_000, Path(folder))
    os.environ |= INLINE_ANSWERS  # as in a run
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    idle, rest = idle_share(IDLE_SECONDS), min(reference() for _ in range(1_000))
    results = []
    for tokens in arguments.tokens:
        # A sequence takes about 10 seconds of real time, on a clock that is faster accordingly.
        load = Load(tokens, tokens / TOKENS_PER_SECOND / 10.0, arguments.replicas, arguments.slots)
        with tempfile.TemporaryDirectory(prefix="driver-") as folder:
            results.append(uvloop.run(run(load, Path(folder), 15.0, arguments.seconds, idle, rest)))
            print(json.dumps(results[-1]), file=sys.stderr)
    print(json.dumps({"processor": results, "memory": held}, indent=2), flush=True)  # whatever happens while Ray ends


if __name__ == "__main__":
    main()
