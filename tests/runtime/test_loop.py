"""Whole runs of the training loop on a virtual clock: what happens to the run when calls fail, hang, or take long.

    TrainingLoop: real ─┬─ RolloutPool, Generation: real ─► replicas.py: an engine that writes each response in some seconds
                        ├─ TrainSession, TrainPool: real ─► Trainer, whose calls take some seconds
                        └─ JournalFile, CheckpointStore: real, and their threads are played by the loop

A run takes milliseconds. Runs whose processes are real are in test_every_call.py and test_faults.py.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray.exceptions import NodeDiedError

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.pipeline.coordinator import Coordinator, NothingToTrain
from qwen35_trainer.pipeline.journal import recover
from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
)
from qwen35_trainer.rewards.reward import CombinedScore, ResponseTokens, RewardFailed
from qwen35_trainer.rollout.rollout_engine import EndReason, SequenceRequest
from qwen35_trainer.runtime import assembly, train_session
from qwen35_trainer.runtime import loop as loop_module
from qwen35_trainer.runtime.calls import ActorLost, Stalled
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, CheckpointStore, StorageFailed
from qwen35_trainer.runtime.device_turns import DeviceTurns
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.generation import FIRST_EVALUATION_GROUP, Generation, GenerationParts
from qwen35_trainer.runtime.job import coordinator_settings, replica_slots
from qwen35_trainer.runtime.journal_file import JournalFile, JournalNotWritten
from qwen35_trainer.runtime.loop import TrainingLoop
from qwen35_trainer.runtime.measurements import TrainingClock
from qwen35_trainer.runtime.probe_schedule import ProbeSchedule
from qwen35_trainer.runtime.rollout_pool import PoolLimits, RolloutPool, RolloutReplica, TooFewReplicas, replica_names
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_session import LiveFields, TrainSession
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.published import StagedShard, StoredBuckets
from qwen35_trainer.weights.weight_manifest import WeightLayout
from tests.operator.kube import virtual

from .replicas import Actor, Handle, VirtualTime, Writer, play, until, weights

PROMPTS, HELD_OUT, PER_UPDATE, SAMPLES = 16, 3, 2, 2
STALL_SECONDS, PUBLISH_SECONDS, OPEN_SECONDS = 300.0, 100.0, 50.0
CHANGES: dict[str, object] = {
    "algorithm.groupSize": SAMPLES,
    "train": {"updates": 5, "batch": {"promptsPerUpdate": PER_UPDATE, "microBatchSequences": 4}},
    "async": {"stalenessThreshold": 1.0, "maxVersionLag": 2, "stallSeconds": STALL_SECONDS},
    "publication": {"timeoutSeconds": PUBLISH_SECONDS},
    "checkpoint": {"everyUpdates": 2},
    "data.shuffle": False,
    "rollout.maxSequencesPerReplica": 8,
    "rollout.nodes": 2,
    "rollout.minNodes": 1,
    "evaluation.atStart": False,
}


class InlineLoop(virtual.Loop):
    """Work for threads is done immediately, except by threads that are stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck: str = ""
        """Name of the function whose threads never end, as on a hard NFS mount without its server."""
        self.is_thread = False
        """Whether the code that runs is played as that of a thread."""

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        if self.stuck and getattr(function, "func", function).__name__ == self.stuck:
            return future
        self.is_thread = True
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001, raised to who awaits it
            future.set_exception(error)
        finally:
            self.is_thread = False
        return future


class InlineTime(VirtualTime):
    _loop_factory = InlineLoop


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return InlineTime()


class Trainer:
    """A train worker whose calls take `seconds`, by method."""

    def __init__(self) -> None:
        self.seconds = {"train": 5.0, "publication": 1.0, "log_probs": 1.0, "save": 1.0, "saved": 3.0}
        self.seconds |= {"sleep": 2.0, "wake": 2.0}
        self.calls: list[str] = []
        """The calls that use the device, and those that give it back and take it."""
        self.during: dict[str, Callable[[], object]] = {}
        """Called in the middle of each call of a method."""
        self.groups: list[int] = []
        """All that have trained."""
        self.batches: list[list[int]] = []
        """Those of each batch, in the order of their samples in it."""
        self.saves: list[Path] = []
        self.needed: dict[int, frozenset[int]] = {}
        """For each version that was copied, the earlier ones whose memory had to stay."""

    async def train(self, batch: TrainBatch, rates: Sequence[float]) -> list[UpdateMetrics]:
        await self._work("train")
        self.groups += np.unique(batch.group).tolist()
        self.batches.append(list(dict.fromkeys(batch.group.tolist())))
        return [UpdateMetrics(0.5, 1.0, rate, int(batch.trainable.sum()), {}) for rate in rates]

    async def publication(self, version: int, needed: frozenset[int]) -> StagedShard:
        self.needed[version] = needed
        await self._work("publication")
        return StagedShard(WeightLayout((), 0), 0, (), StoredBuckets((), changes_follow=False))

    async def log_probs(self, batch: TrainBatch) -> NDArray[np.float32]:
        await self._work("log_probs")
        return np.zeros(batch.responses.size, np.float32)

    async def save(self, folder: Path) -> None:
        await self._work("save")
        self.saves.append(folder)

    async def saved(self) -> None:
        await self._work("saved")

    async def sleep(self) -> MemoryChange:
        await self._work("sleep")
        return MemoryChange(16, 1)

    async def wake(self) -> None:
        await self._work("wake")

    async def _work(self, method: str) -> None:
        if method != "saved":  # a thread writes what `save` has copied
            self.calls.append(f"ranks: {method}")
        await asyncio.sleep(self.seconds[method] / 2)
        self.during.get(method, lambda: None)()
        await asyncio.sleep(self.seconds[method] / 2)


class Scores:
    """Scores the samples of a group by their number, after a while."""

    def __init__(self) -> None:
        self.seconds, self.error = 0.5, None
        self.error: Exception | None
        self.late: dict[str, float] = {}
        """Further seconds for the group of a prompt."""

    async def score_group(
        self, prompt: Prompt, responses: Sequence[ResponseTokens], *, in_trial: bool
    ) -> tuple[CombinedScore, ...]:
        await asyncio.sleep(self.seconds + self.late.get(prompt.id, 0.0))
        if self.error is not None:
            raise self.error
        return tuple(CombinedScore(float(index), {"index": float(index)}, {}) for index in range(len(responses)))


class Records:
    """A sink that keeps all records."""

    def __init__(self) -> None:
        self.all: list[RunRecord] = []

    def write(self, record: RunRecord) -> None:
        self.all.append(record)

    def close(self) -> None:
        pass


@dataclass
class Run:
    """A training loop with everything that it needs, and what became of it."""

    folder: Path
    write: Callable[..., Path]
    changes: dict[str, object] = field(default_factory=dict)
    engine: type[Writer] = Writer
    prepare: Callable[[Actor, str, int], object] = lambda actor, name, number: None
    """Called with each replica's actor, its name and number before it starts."""
    probes: ProbeSchedule | None = None
    has_last_evaluation: bool = False
    resumes_at: int = 0
    """The update of the checkpoint in its own folder from which the run continues. 0: it is new."""
    resumes_elsewhere: bool = False
    """Whether that checkpoint is in another folder instead."""

    def __post_init__(self) -> None:
        changes = copy.deepcopy(CHANGES | self.changes)  # in this order: later ones may be of parts of earlier ones
        self.spec = load_manifest(self.write(self.folder, changes)).spec
        self.trainer, self.scores, self.records = Handle(Trainer()), Scores(), Records()
        self.actors: dict[int, Actor] = {}
        self.names: dict[int, str] = {}
        self.stop = asyncio.Event()
        self.turns: list[tuple[str, float, float, str]] = []
        self.loop: TrainingLoop
        self.ended_at = 0.0

    async def outcome(self) -> str:
        """Run it to its end. Raises what ends it."""
        with Recorder(self.folder / "metrics.jsonl", [self.records]) as recorder:
            self.loop = self._loop(recorder)
            names = [] if self.shares else replica_names(self.spec.rollout_replicas)
            first = [self.spawn(number, name, False) for number, name in enumerate(names)]
            try:
                async with asyncio.timeout(20 * STALL_SECONDS):
                    return await self.loop.run(weights(self.loop.coordinator.version), first)
            except BaseExceptionGroup as group:
                raise one_of(group) from group
            finally:
                self.ended_at = now()
                await asyncio.sleep(0.01)
                remaining = [task for task in asyncio.all_tasks() if "qwen35_trainer" in code_of(task)]
                assert remaining == [], "the run is over, and something of it continues"

    def spawn(self, number: int, name: str, lane: bool) -> RolloutReplica:
        self.actors[number], self.names[number] = Actor(f"pod-{number}", self.engine), name
        self.prepare(self.actors[number], name, number)
        return RolloutReplica(number, name, self.actors[number], lane)

    def _loop(self, recorder: Recorder) -> TrainingLoop:
        spec, clock = self.spec, TrainingClock(0.0)
        training = TrainSession(
            spec=spec,
            pool=TrainPool([self.trainer], STALL_SECONDS),
            recorder=recorder,
            checkpoints=CheckpointStore(self.folder / "checkpoints", 9, stall_seconds=STALL_SECONDS),
            clock=clock,
            live=LiveFields.of(spec),
            exports=Exports(self.stop, STALL_SECONDS),
            attempt="attempt",
            updates_total=spec.train.updates,
            update=self.resumes_at,
            begins_saved=self.resumes_at > 0 and not self.resumes_elsewhere,
        )
        prompts = [
            EncodedPrompt(Prompt(f"train/{row}", "train", str(row)), np.full(2, row, np.int32))
            for row in range(PROMPTS + HELD_OUT)
        ]
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        order = PromptOrder(PROMPTS, seed=0, epochs=None, shuffle=False)
        parts = GenerationParts(
            spec, prompts[:PROMPTS], prompts[PROMPTS:], order, self.scores, recorder, clock, inbox.put_nowait
        )
        generation = Generation(parts, spec.rollout_replicas)
        generation.pool = RolloutPool(
            self.spawn,
            generation,
            PoolLimits(replica_slots(spec), OPEN_SECONDS, PUBLISH_SECONDS, STALL_SECONDS),
            target=spec.rollout_replicas,
            minimum=self.spec.replicas_on(self.spec.min_rollout_nodes),
            takes_turns=self.shares,
        )
        turns = DeviceTurns(training.pool, generation.pool, lambda *turn: self.turns.append(turn))
        sampler: Any = SimpleNamespace(
            trained=lambda groups, **_: None, evaluated=lambda groups, **_: None, close=lambda: None
        )
        return TrainingLoop(
            coordinator=Coordinator(coordinator_settings(spec, spec.train.updates), self._scheduling_start),
            generation=generation,
            training=training,
            journal=JournalFile(self.folder / "journal", stall_seconds=STALL_SECONDS),
            inbox=inbox,
            stop=self.stop,
            sampler=sampler,
            evaluates=True,
            has_last_evaluation=self.has_last_evaluation,
            probes=self.probes,
            turns=turns if self.shares else None,
        )

    async def leave_checkpoint(self) -> Path:
        """Save the checkpoint from which the run resumes, as an earlier attempt, and return its path."""
        start = self._scheduling_start
        meta = CheckpointMeta(self.resumes_at, start.batch, start.position, (), 1.0, start.group, "earlier")

        async def write(folder: Path) -> None:
            (folder / "state").write_text("weights")

        return await CheckpointStore(self.folder / "checkpoints", 9).save(meta, write)

    @property
    def _scheduling_start(self) -> SchedulingSnapshot:
        trained = self.resumes_at * PER_UPDATE
        return SchedulingSnapshot(self.resumes_at, trained, (), trained)

    @property
    def shares(self) -> bool:
        """Whether the pools share their devices."""
        return self.spec.mode == "Colocated"

    def of[R: RunRecord](self, kind: type[R]) -> list[R]:
        return [record for record in self.records.all if isinstance(record, kind)]

    @property
    def evaluated(self) -> list[int]:
        """The updates after which the held-out prompts were evaluated."""
        return [record.update for record in self.of(EvaluationRecord)]

    def check_complete(self) -> None:
        """Every update has trained, each prompt once and in time, and nothing is left over."""
        total = self.spec.train.updates
        updates = self.of(UpdateRecord)
        assert [record.update for record in updates] == list(range(1, total + 1))
        assert all((record.lag_max or 0) <= 2 for record in updates)
        assert len(self.trainer.worker.groups) == len(set(self.trainer.worker.groups)) == total * PER_UPDATE
        self.check_saved(total)
        generation: Any = self.loop.generation
        assert not any((generation._sequences, generation._progress, self.loop._evaluations))
        assert all(group < FIRST_EVALUATION_GROUP for group in generation._groups), "an evaluation was never forgotten"
        assert self.loop._copies == {}

    def check_saved(self, update: int) -> None:
        """The newest checkpoint is that of `update`, and the journal continues from it."""
        latest = CheckpointStore(self.folder / "checkpoints", 9).latest()
        assert latest is not None
        assert latest.progress.update == update
        snapshot = recover((self.folder / "journal").read_bytes(), latest.progress.batch)
        assert snapshot.position - len(snapshot.pending) == update * PER_UPDATE, "each prompt has its turn once"


@pytest.fixture
def start(tmp_path, write, monkeypatch) -> Callable[..., Run]:
    """start(changes, …) is a run."""
    play(monkeypatch)
    monkeypatch.setattr(ray, "put", lambda value: value)

    def make(changes: dict[str, object] | None = None, **fields: Any) -> Run:
        return Run(tmp_path, write, changes or {}, **fields)

    return make


def one_of(group: BaseExceptionGroup) -> BaseException:
    """One of several exceptions that have the same reason."""
    assert len({type(error) for error in group.exceptions}) == 1, group.exceptions
    return group.exceptions[0]


def code_of(task: asyncio.Task[Any]) -> str:
    """The file of the code that a task runs."""
    coroutine: Any = task.get_coro()
    return str(coroutine.cr_code.co_filename)


def probes() -> ProbeSchedule:
    return ProbeSchedule((np.array([3, 4, 5], np.int32),), limit=0.1)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_run_trains_publishes_evaluates_and_saves(start):
    run = start({"evaluation": {"atStart": True, "everyUpdates": 2}})
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert run.evaluated == [0, 2, 4, 5]
    assert [record.update for record in run.of(CheckpointRecord)] == [2, 4, 5]
    published = [record.version for record in run.of(SpanRecord) if record.kind == "publish"]
    assert published == [1, 2, 3, 4, 5]
    assert all(actor.worker.loaded == [0, 1, 2, 3, 4, 5] for actor in run.actors.values())
    needed = run.trainer.worker.needed
    assert all({version - 1} <= those <= {version - 1, version - 2} for version, those in needed.items())


async def test_batches_are_assembled_by_a_thread_and_copies_are_in_the_records(start, monkeypatch):
    """Both keep the trainer waiting. Long responses take seconds to assemble, in which replicas would wait for answers."""
    assembled = []

    def assemble(*arguments: Any, **options: Any) -> Any:
        assembled.append(asyncio.get_running_loop().is_thread)
        return assembly.assemble(*arguments, **options)

    monkeypatch.setattr(loop_module, "assemble", assemble)
    for module in (loop_module, train_session):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=now))
    run = start()
    run.trainer.worker.seconds |= {"train": 5.0, "publication": 2.0}
    assert await run.outcome() == "Succeeded"
    assert assembled == [True] * 5
    updates = run.of(UpdateRecord)
    assert [round(record.seconds_copying, 3) for record in updates] == [0.0, 2.0, 2.0, 2.0, 2.0]
    assert {round(record.seconds_training, 3) for record in updates} == {5.0}


async def test_no_publication_waits_for_a_probe_and_no_batch_trains_during_it(start):
    run = start(probes=probes())
    versions, newest, trained = list[int](), list[list[int]](), list[int]()

    def look() -> None:
        versions.append(max(run.trainer.worker.needed, default=0))
        newest.append([actor.worker.loaded[-1] for actor in run.actors.values()])
        trained.append(len(run.trainer.worker.groups))

    run.trainer.worker.during["log_probs"] = look
    run.trainer.worker.seconds |= {"train": 0.1, "log_probs": 0.5}  # it waits longer for its batches
    run.scores.seconds = 5.0
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert versions[:2] == [0, 1]
    assert len(versions) >= 3
    assert newest == [[version] * 2 for version in versions], "the replicas load a version while its probe is computed"
    assert trained == [version * PER_UPDATE for version in versions], "the probe is of the weights that were copied"
    assert [actor.worker.probed for actor in run.actors.values()] == [versions] * 2


async def test_a_trainer_that_never_waits_computes_no_probe_after_the_first_that_takes_long(start):
    run = start({"train.updates": 4}, probes=probes())
    run.trainer.worker.seconds |= {"log_probs": 30.0, "train": 60.0}
    calls = list[float]()
    run.trainer.worker.during["log_probs"] = lambda: calls.append(now())
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert len(calls) == 1
    # The last version is published after the record of the last update.
    assert sum(record.probes_skipped for record in run.of(UpdateRecord)) == 3


# The train pool.

TRAIN_CALLS = {"train": "training a batch", "publication": "copying the weights", "log_probs": "computing a probe"} | {
    "save": "copying the state for a checkpoint",
    "saved": "writing a checkpoint",
}


@pytest.mark.parametrize("fault", ["lose", "hang"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("method", TRAIN_CALLS)
async def test_a_train_worker_that_is_lost_or_hangs_ends_the_run_by_name(start, method, at, fault):
    run = start(probes=probes())
    run.scores.seconds = 10.0  # the trainer waits for its batches, so that every version gets a probe
    run.trainer.faults[method] += [*[""] * (at - 1), fault]
    with pytest.raises(ActorLost if fault == "lose" else Stalled) as raised:
        await run.outcome()
    if method == "saved" and fault == "lose":  # a batch trains at the same time
        assert str(raised.value).startswith("the train pool was lost during ")
    elif fault == "lose":
        assert str(raised.value).startswith(f"the train pool was lost during {TRAIN_CALLS[method]}: ")
    else:
        assert str(raised.value).startswith(
            f"the train pool (train-0) did not finish {TRAIN_CALLS[method]} within {STALL_SECONDS:g} s"
        )
    saved = CheckpointStore(run.folder / "checkpoints", 9).latest()
    assert (saved.progress.update if saved else 0) == max((r.update for r in run.of(CheckpointRecord)), default=0)


async def test_a_batch_that_trains_longer_than_a_group_may_take_does_not_stall_the_run(start):
    run = start()
    run.trainer.worker.seconds["train"] = 0.9 * STALL_SECONDS
    run.trainer.worker.seconds["saved"] = 0.9 * STALL_SECONDS
    assert await run.outcome() == "Succeeded"
    run.check_complete()


# Replicas. One of two is lost or hangs; the run continues with the other.

REPLICA_FAULTS = [
    (method, fault, at)
    for method, ats in {"address": [1], "open": [1], "exchange": [1, 2, 4, 9], "obey": [1, 2]}.items()
    for fault in ("lose", "hang", "reply", "request")
    for at in ats
    if method in ("exchange", "obey") or fault in ("lose", "hang")
]


@pytest.mark.parametrize(("method", "fault", "at"), REPLICA_FAULTS)
async def test_a_replica_whose_call_fails_or_hangs_does_not_end_the_run(start, method, fault, at):
    def prepare(actor: Actor, name: str, number: int) -> None:
        if number == 0:
            actor.faults[method] += [*[""] * (at - 1), fault]

    run = start(prepare=prepare)
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    if fault in ("reply", "request"):
        assert len(run.actors) == 2, "it answered again"
    elif fault == "lose":
        assert list(run.names.values()) == ["rollout-0", "rollout-1", "rollout-0"]


class Refusing(Writer):
    """Refuses all sequences immediately once `refuses` is set, as an engine that has lost a mounted folder does."""

    refuses = False

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        if not self.refuses:
            super().submit(requests)
            return
        for request in requests:
            tokens, finished, errors = (self._next.get(key, {}) for key in ("tokens", "finished", "errors"))
            name = request.sequence
            self.tell(
                tokens=tokens | {name: [request.kept]},
                finished=finished | {name: EndReason.ERROR},
                errors=errors | {name: "no such folder"},
            )


async def test_a_replica_that_refuses_everything_is_replaced_and_no_prompt_is_lost(start, caplog):
    """It answers in no time, so that it always has the most free slots."""

    def prepare(actor: Actor, name: str, number: int) -> None:
        actor.worker._engine.refuses = number == 1

    run = start({"train.updates": 10}, engine=Refusing, prepare=prepare)
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert list(run.names.values()) == ["rollout-0", "rollout-1", "rollout-1"]
    assert run.loop.coordinator.left_by_reason[LeaveReason.FAILED] == 0
    assert "rollout-1 was lost: it refused" in caplog.text
    assert "no such folder" in caplog.text


async def test_prompts_that_every_replica_refuses_end_no_replica(start):
    def prepare(actor: Actor, name: str, number: int) -> None:
        actor.worker._engine.refuses = True

    run = start(engine=Refusing, prepare=prepare)
    with pytest.raises(NothingToTrain, match="no such folder"):
        await run.outcome()
    assert list(run.names.values()) == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("method", ["address", "open", "exchange", "obey"])
async def test_the_only_replica_may_hang_as_long_as_another_can_take_its_place(start, method):
    def prepare(actor: Actor, name: str, number: int) -> None:
        if number == 0:
            actor.faults[method].append("hang")
        if method == "address":  # its pod comes after a while
            asyncio.get_running_loop().call_later(0.9 * STALL_SECONDS, actor.worker.scheduled.set)

    run = start({"rollout.nodes": 1}, prepare=prepare)
    if method == "address":
        with pytest.raises(TooFewReplicas, match=r"0 of 1 replicas worked for 350 s.* rollout-0 is pending"):
            await run.outcome()
        return
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert run.names == {0: "rollout-0", 1: "rollout-0"}


async def test_a_pod_that_comes_late_is_waited_for(start):
    def prepare(actor: Actor, name: str, number: int) -> None:
        actor.worker.scheduled.clear()
        asyncio.get_running_loop().call_later(0.9 * STALL_SECONDS, actor.worker.scheduled.set)

    run = start(prepare=prepare)
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert len(run.actors) == 2


@pytest.mark.parametrize("during", ["train", "publication", "save", "saved"])
async def test_all_replicas_may_be_lost_together_whatever_the_train_pool_does(start, during):
    """Also while a version is copied: those that come join with the version before."""
    run = start()
    calls = iter(range(10))

    def lose() -> None:
        if next(calls) == 1:
            for actor in list(run.actors.values()):
                actor.die(NodeDiedError("The node died."))

    run.trainer.worker.during[during] = lose
    run.trainer.worker.seconds["publication"] = 20.0
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert len(run.actors) == 4


async def test_all_replicas_may_be_gone_when_a_copy_is_published(start):
    """The version counts as published immediately, and what joins later has it."""

    def prepare(actor: Actor, name: str, number: int) -> None:
        if number > 1:
            actor.worker.opening.clear()
            asyncio.get_running_loop().call_later(30.0, actor.worker.opening.set)

    run = start(prepare=prepare)
    calls = iter(range(10))

    def lose() -> None:
        if next(calls) == 1:
            for actor in list(run.actors.values()):
                actor.die()

    run.trainer.worker.during["publication"] = lose
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert run.actors[2].worker.loaded[0] >= 2


async def test_a_version_whose_only_replica_is_lost_while_it_loads_is_loaded_by_its_replacement(start):
    def prepare(actor: Actor, name: str, number: int) -> None:
        if number == 0:
            original = actor.worker._load

            async def load(version: int) -> None:
                if version == 2:
                    actor.die()
                await original(version)

            actor.worker._load = load

    run = start({"rollout.nodes": 1}, prepare=prepare)
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert run.actors[1].worker.loaded == [2, 3, 4, 5]


# Slow parts.


class Slow(Writer):
    """Later responses take longer."""

    def duration(self, request: Any) -> float:
        return 1.0 + 7.0 * (sum(request.sequence) % 5)


async def test_responses_that_take_longer_than_updates_train_in_time(start):
    run = start(engine=Slow)
    run.trainer.worker.seconds["train"] = 0.5
    assert await run.outcome() == "Succeeded"
    run.check_complete()


def load_slowly(seconds: float) -> Callable[[Actor, str, int], None]:
    def prepare(actor: Actor, name: str, number: int) -> None:
        original = actor.worker._load

        async def load(version: int) -> None:
            await asyncio.sleep(seconds * (version > 0))
            await original(version)

        actor.worker._load = load

    return prepare


@pytest.mark.parametrize("every", [0, 1])
async def test_publications_may_be_slower_than_updates(start, every):
    """At most one version is in transfer, and one more is copied. An evaluation is never lost."""
    run = start(
        {"evaluation": {"atStart": True, "everyUpdates": every}, "train.updates": 7},
        prepare=load_slowly(40.0),
    )
    run.trainer.worker.seconds["train"] = 0.5
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    loaded = run.actors[0].worker.loaded
    assert loaded == sorted(loaded)
    assert loaded[-1] == 7
    if every:
        assert run.evaluated == [update for update in range(8) if update in loaded]
        assert run.evaluated == list(range(8)), "every version is published, so each is evaluated"
    else:
        assert run.evaluated == [0, 7]


async def test_an_evaluation_at_every_update_with_slow_scores_is_never_lost(start):
    run = start({"evaluation": {"atStart": True, "everyUpdates": 1}})
    run.scores.seconds = 20.0
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert sorted(run.evaluated) == [0, 1, 2, 3, 4, 5]
    assert all(record.samples == HELD_OUT for record in run.of(EvaluationRecord))


# A stop.


def stop_after(run: Run, condition: Callable[[], object]) -> asyncio.Task[float]:
    """Stop the run when the condition holds. The result is the time of that."""

    async def wait() -> float:
        await until(condition, step=0.1)
        run.stop.set()
        return now()

    return asyncio.create_task(wait())


async def test_a_stop_during_an_evaluation_does_not_wait_for_it(start, caplog):
    class Endless(Writer):
        def duration(self, request: Any) -> float:
            return 3000.0 if request.sequence[0] >= FIRST_EVALUATION_GROUP else 1.0

    run = start({"evaluation": {"atStart": False, "everyUpdates": 1}}, engine=Endless)
    stopping = stop_after(run, lambda: any(a.engine._running and a.engine.version == 1 for a in run.actors.values()))
    caplog.set_level("INFO", loop_module.logger.name)
    assert await run.outcome() == "Stopped"
    assert run.ended_at - await stopping < 30.0
    updates = len(run.of(UpdateRecord))
    assert updates >= 1
    run.check_saved(updates)
    assert run.evaluated == []
    assert "the evaluation after update 1 was skipped" in caplog.text
    generation: Any = run.loop.generation
    assert all(group < FIRST_EVALUATION_GROUP for group in generation._groups)
    assert all(actor.engine.dropped for actor in run.actors.values() if actor.engine.submitted)


async def test_a_stop_during_a_publication_that_hangs_does_not_wait_for_it(start):
    run = start(prepare=load_slowly(90.0))
    stopping = stop_after(run, lambda: len(run.of(UpdateRecord)) == 2)
    assert await run.outcome() == "Stopped"
    assert run.ended_at - await stopping < 20.0
    run.check_saved(len(run.of(UpdateRecord)))


async def test_a_stop_finishes_the_batch_in_training_and_saves_it(start):
    run = start({"checkpoint": {"everyUpdates": 100}})
    run.trainer.worker.seconds["train"] = 50.0
    stopping = stop_after(run, lambda: run.trainer.counts["train"] == 2)
    assert await run.outcome() == "Stopped"
    assert 40.0 < run.ended_at - await stopping < 70.0
    assert len(run.of(UpdateRecord)) == 2
    run.check_saved(2)


@pytest.mark.parametrize("saving", [False, True])
async def test_a_stop_saves_once(start, saving):
    """Also when the checkpoint of the last update is being written."""
    run = start({"checkpoint": {"everyUpdates": 2 if saving else 1000}})
    run.trainer.worker.seconds["saved"] = 40.0
    stop_after(run, lambda: run.trainer.counts["saved"] if saving else len(run.of(UpdateRecord)) == 2)
    assert await run.outcome() == "Stopped"
    run.check_saved(len(run.of(UpdateRecord)))
    assert len({path.name for path in run.trainer.worker.saves}) == len(run.trainer.worker.saves)


async def test_a_stop_before_the_first_replica_has_joined_ends_the_run_immediately(start):
    run = start(prepare=lambda actor, name, number: actor.worker.scheduled.clear())
    stopping = stop_after(run, lambda: now() > 10.0)
    assert await run.outcome() == "Stopped"
    assert run.ended_at - await stopping < 10.0
    assert run.of(UpdateRecord) == []
    run.check_saved(0)


async def test_a_stop_soon_after_a_resume_saves_nothing_and_leaves_the_checkpoint_as_it_was(start):
    run = start(prepare=lambda actor, name, number: actor.worker.scheduled.clear(), resumes_at=4)
    checkpoint = await run.leave_checkpoint()
    before = checkpoint.stat().st_ino
    stop_after(run, lambda: now() > 10.0)
    assert await run.outcome() == "Stopped"
    assert (run.trainer.worker.saves, run.of(CheckpointRecord)) == ([], [])
    assert checkpoint.stat().st_ino == before, "it is the same folder"


async def test_a_stop_after_a_resume_saves_what_has_trained_since(start):
    run = start({"checkpoint": {"everyUpdates": 100}}, resumes_at=2)
    await run.leave_checkpoint()
    stop_after(run, lambda: len(run.of(UpdateRecord)) == 1)
    assert await run.outcome() == "Stopped"
    run.check_saved(2 + len(run.of(UpdateRecord)))


@pytest.mark.parametrize("changes", [{}, {"mode": "Colocated"}])
async def test_a_run_that_ended_before_its_last_evaluation_makes_it_after_a_resume_and_trains_nothing(start, changes):
    run = start((COLOCATED | {"evaluation.atStart": False} if changes else {}) | {"train.updates": 4}, resumes_at=4)
    await run.leave_checkpoint()
    assert await run.outcome() == "Succeeded"
    assert run.evaluated == [4]
    assert (run.of(UpdateRecord), run.of(CheckpointRecord)) == ([], [])


async def test_a_run_whose_last_evaluation_is_recorded_makes_no_second_one_after_a_resume(start):
    run = start({"train.updates": 4}, resumes_at=4, has_last_evaluation=True)
    await run.leave_checkpoint()
    assert await run.outcome() == "Succeeded"
    assert run.evaluated == []


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("wanted", ["None", "AtEnd", "EveryCheckpoint"])
async def test_a_run_that_ended_before_its_last_export_makes_it_after_a_resume(start, monkeypatch, wanted, made):
    async def export(exports: Exports, checkpoint: Path, *_: object) -> tuple[Path, str]:
        return checkpoint.parent / "exports" / checkpoint.name, ""

    monkeypatch.setattr(Exports, "export", export)
    run = start({"train.updates": 4, "checkpoint": {"export": wanted}}, resumes_at=4, has_last_evaluation=True)
    folder = (await run.leave_checkpoint()).parent / "exports" / "update-000004"
    if made:
        folder.mkdir(parents=True)
    assert await run.outcome() == "Succeeded"
    expected = [] if made or wanted == "None" else [(4, str(folder), "")]
    assert [(record.update, record.path, record.problem) for record in run.of(ExportRecord)] == expected


async def test_a_finished_run_that_is_resumed_in_another_folder_saves_its_checkpoint_there(start):
    run = start({"train.updates": 4}, resumes_at=4, resumes_elsewhere=True, has_last_evaluation=True)
    assert await run.outcome() == "Succeeded"
    assert run.of(UpdateRecord) == []
    run.check_saved(4)


async def test_a_stop_during_the_last_evaluation_leaves_it_to_the_next_attempt(start):
    class Endless(Writer):
        def duration(self, request: Any) -> float:
            return 3000.0 if request.sequence[0] >= FIRST_EVALUATION_GROUP else 1.0

    run = start(engine=Endless)
    stop_after(run, lambda: run.of(CheckpointRecord) and run.of(CheckpointRecord)[-1].update == 5)
    assert await run.outcome() == "Stopped"
    run.check_saved(5)
    assert run.evaluated == []


async def test_a_stop_while_the_last_evaluation_is_scored_leaves_it_to_the_next_attempt(start):
    run = start()

    def score_slowly() -> None:
        run.scores.seconds = 200.0

    run.trainer.worker.during["train"] = lambda: run.loop.training.update == 4 and score_slowly()
    stop_after(run, lambda: run.loop._scoring)
    assert await run.outcome() == "Stopped"
    assert run.evaluated == []


# What ends a run.


class Never(Writer):
    """Responses of some groups are never complete, although the engine makes steps."""

    groups = range(2, 100)

    def duration(self, request: Any) -> float:
        return 1e6 if request.sequence[0] in self.groups else 1.0


async def test_a_run_in_which_no_group_finishes_stalls_and_names_what_is_missing(start):
    run = start(engine=Never)
    with pytest.raises(Stalled) as raised:
        await run.outcome()
    assert str(raised.value).startswith(
        f"no group finished within spec.async.stallSeconds {STALL_SECONDS:g}: 0 of {PER_UPDATE} are ready"
    )
    assert len(run.of(UpdateRecord)) == 1
    # Since the last order of the train pool was carried out.
    last = 1.0 + 0.5 + 5.0 + 1.0
    assert run.ended_at == pytest.approx(STALL_SECONDS + last, abs=2.0)


async def test_too_few_replicas_do_not_stall_the_run_and_have_a_time_limit_of_their_own(start):
    """The time without replicas does not count as a time without groups."""

    def prepare(actor: Actor, name: str, number: int) -> None:
        if number > 1:
            actor.worker.scheduled.clear()
            asyncio.get_running_loop().call_later(0.9 * STALL_SECONDS, actor.worker.scheduled.set)

    class Long(Writer):
        seconds = 0.5 * STALL_SECONDS

    run = start({"train.updates": 2}, engine=Long, prepare=prepare)

    def lose() -> None:
        for actor in list(run.actors.values()):
            actor.die()

    asyncio.get_running_loop().call_later(0.4 * STALL_SECONDS, lose)
    assert await run.outcome() == "Succeeded"
    run.check_complete()


def crash_soon(actor: Actor, name: str, number: int) -> None:
    """Let a replica start in 40 s and end after ten more."""
    loop = asyncio.get_running_loop()
    actor.worker.opening.clear()
    loop.call_later(40.0, actor.worker.opening.set)
    loop.call_later(50.0, actor.die)


async def test_replicas_that_crash_before_they_finish_a_sequence_end_the_run_in_about_the_time_of_a_stall(start):
    class Endless(Writer):
        seconds = 1e6

    run = start({"rollout.nodes": 1}, engine=Endless, prepare=crash_soon)
    with pytest.raises(TooFewReplicas, match=r"0 of 1 replicas worked for 300 s.* its process ended"):
        await run.outcome()
    assert run.ended_at < 2 * STALL_SECONDS


async def test_replicas_that_crash_after_they_have_finished_sequences_do_not_end_the_run(start):
    run = start({"rollout.nodes": 1, "train.updates": 25}, prepare=crash_soon)
    run.trainer.worker.seconds["train"] = 30.0
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert run.ended_at > 2 * STALL_SECONDS


async def test_a_reward_that_may_not_fail_ends_the_run(start):
    run = start()
    run.scores.error = RewardFailed("reward judge, onError Fail, prompt train/0: no")
    with pytest.raises(RewardFailed, match="reward judge"):
        await run.outcome()


@pytest.mark.parametrize("at", [1, 2])
async def test_a_journal_that_cannot_be_written_ends_the_run_before_its_batch_trains(start, monkeypatch, at):
    run = start()
    flushes = iter(range(1, 100))
    flush = JournalFile._append

    def append(file: JournalFile) -> None:
        if next(flushes) == at:
            raise OSError(28, "No space left on device")
        flush(file)

    monkeypatch.setattr(JournalFile, "_append", append)
    with pytest.raises(JournalNotWritten, match="No space left on device"):
        await run.outcome()
    assert run.trainer.counts["train"] == at - 1


STORAGE_STEPS = {
    "_has_complete": "checkpoint {}/checkpoints/update-000002 was not saved: the storage of {}/checkpoints",
    "_begin": "checkpoint {}/checkpoints/update-000002 was not saved: the storage of {}/checkpoints",
    "_finish": "checkpoint {}/checkpoints/update-000002 was not saved: the storage of {}/checkpoints",
    "_delete_old": "checkpoint {}/checkpoints/update-000002 was saved, but old checkpoints were not deleted: the storage",
    "_append": "journal {}/journal was not written: the disk",
    "_compact": "journal {}/journal was not written: the disk",
}
"""What a thread does with files while a run trains → beginning of the error if it never ends."""


@pytest.mark.parametrize("step", STORAGE_STEPS)
@pytest.mark.parametrize("stops", [False, True])
async def test_storage_that_never_answers_ends_the_run_by_name_within_the_time_for_a_stall(
    start, monkeypatch, step, stops
):
    run = start({"train.updates": 40})
    monkeypatch.setattr(asyncio.get_running_loop(), "stuck", step)
    if stops:
        stop_after(run, lambda: run.trainer.counts["saved"] or now() > 20.0)
    with pytest.raises((StorageFailed, JournalNotWritten)) as raised:
        await run.outcome()
    assert str(raised.value).startswith(STORAGE_STEPS[step].format(run.folder, run.folder))
    assert f"did not answer within spec.async.stallSeconds {STALL_SECONDS:g} s" in str(raised.value)
    assert "then continue with --resume auto" in str(raised.value)
    assert run.ended_at < STALL_SECONDS + 60.0


async def test_replicas_that_can_never_work_end_the_run_before_its_time_limit(start):
    def prepare(actor: Actor, name: str, number: int) -> None:
        actor.engine.fail(RuntimeError("CUDA error: no kernel image is available"))

    run = start(prepare=prepare)
    with pytest.raises(TooFewReplicas, match=r"no replica has ever worked.*no kernel image is available"):
        await run.outcome()
    assert run.ended_at < 0.1 * STALL_SECONDS


# Pools that share their devices.

COLOCATED: dict[str, object] = {
    "mode": "Colocated",
    "async": {"stallSeconds": STALL_SECONDS},
    "train": {"nodes": 2, "updates": 3, "batch": {"promptsPerUpdate": PER_UPDATE, "microBatchSequences": 2}},
    "checkpoint": {"everyUpdates": 3},
}


async def test_the_updates_of_a_batch_train_in_the_order_of_the_data_whichever_group_finished_first(start):
    """In order of completion, the first update would get the groups of short responses, and the last one those of long ones."""
    run = start(COLOCATED | {"async": {"stallSeconds": STALL_SECONDS, "updatesPerBatch": 2}, "train.updates": 4})
    run.scores.late = {f"train/{row}": (5.0, 1.0, 9.0, 3.0)[row % 4] for row in range(PROMPTS)}
    assert await run.outcome() == "Succeeded"
    assert run.trainer.worker.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def recording(calls: list[str]) -> type[Writer]:
    """An engine that records its calls, as a stand-in for vLLM, and refuses to work while it sleeps."""

    class Recording(Writer):
        awake = True

        def submit(self, requests: Any) -> None:
            assert self.awake, "a sleeping replica gets sequences"
            calls.append("replica: generate")
            super().submit(requests)

        def tell(self, **fields: Any) -> None:
            if "loaded" in fields:
                assert self.awake, "a sleeping replica gets weights"
                calls.append(f"replica: load {fields['loaded']}")
            super().tell(**fields)

        def sleep(self) -> None:
            assert not self._running, "a replica with sequences falls asleep"
            self.awake = False
            calls.append("replica: sleep")
            super().sleep()

        def wake(self) -> None:
            self.awake = True
            calls.append("replica: wake")
            super().wake()

    return Recording


def sides(calls: Sequence[str]) -> list[str]:
    """The calls without repetitions of one call in a row, as by several replicas."""
    return [call for number, call in enumerate(calls) if number == 0 or calls[number - 1] != call]


async def test_pools_on_the_same_devices_sleep_while_the_other_one_works(start):
    calls: list[str] = []
    run = start(COLOCATED, engine=recording(calls), probes=probes())
    run.trainer.worker.calls = calls
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert len(run.actors) == 2
    print("CALLS", "\n".join(sides(calls)), run.turns)
    generation = ["replica: generate", "replica: sleep"]
    training = ["ranks: wake", "ranks: train", "ranks: publication", "ranks: log_probs"]
    turn = ["ranks: sleep", "replica: wake"]
    assert sides(calls) == [
        *["ranks: log_probs", "ranks: sleep", "replica: load 0", *generation],
        *[*training, *turn, "replica: load 1", *generation],
        *[*training, *turn, "replica: load 2", *generation],
        *[*training, "ranks: save", *turn, "replica: load 3", "replica: generate"],  # the last evaluation
    ]
    assert [side for side, *_ in run.turns] == ["training", "generation"] * 3 + ["training"]
    assert {label for _, _, _, label in run.turns} == {
        f"gives back {MemoryChange(16, 1)}",
        f"gives back {MemoryChange(16, 0)}",
    }


async def test_a_replica_that_is_lost_starts_again_only_while_replicas_have_the_devices(start):
    calls: list[str] = []
    run = start(COLOCATED, engine=recording(calls))
    started: list[str] = []
    run.prepare = lambda actor, name, number: (started.append(name), calls.append("replica: starts"))
    run.trainer.worker.calls = calls
    run.trainer.worker.during["train"] = lambda: len(run.actors) == 2 and run.actors[0].die()
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert started == ["rollout-0", "rollout-1", "rollout-0"]
    last = len(calls) - calls[::-1].index("replica: starts")
    assert "ranks: sleep" in calls[calls.index("ranks: train") : last], "not during the batch in which it was lost"


async def test_a_replica_that_is_lost_as_a_long_turn_of_training_begins_does_not_end_the_run(start):
    """The run needs both replicas, and none can start before the turn ends. The turn takes longer than the limit."""

    def prepare(actor: Actor, name: str, number: int) -> None:
        actor.worker.opening.clear()
        asyncio.get_running_loop().call_later(0.8 * OPEN_SECONDS, actor.worker.opening.set)

    run = start(COLOCATED | {"rollout.minNodes": 2}, prepare=prepare)
    run.trainer.worker.seconds |= {"train": 0.9 * STALL_SECONDS, "publication": 0.2 * STALL_SECONDS}
    run.trainer.worker.during["wake"] = lambda: len(run.actors) == 2 and run.actors[0].die()
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert list(run.names.values()) == ["rollout-0", "rollout-1", "rollout-0"]


async def test_a_replica_that_does_not_give_its_memory_back_is_lost(start):
    run = start(COLOCATED)
    stuck: list[str] = []

    def prepare(actor: Actor, name: str, number: int) -> None:
        if number == 1:
            actor.engine.sleep = lambda: stuck.append(name)

    run.prepare = prepare
    assert await run.outcome() == "Succeeded"
    run.check_complete()
    assert (stuck, list(run.names.values())) == (["rollout-1"], ["rollout-0", "rollout-1", "rollout-1"])


async def test_a_run_that_stops_while_replicas_have_the_devices_saves_what_has_trained(start):
    run = start(COLOCATED)

    def stop(version: int) -> None:
        if version == 2:
            asyncio.get_running_loop().call_later(0.1, run.stop.set)

    run.prepare = lambda actor, name, number: setattr(actor.engine, "loaded", stop)
    tell = Writer.tell
    try:
        Writer.tell = lambda self, **fields: (stop(fields.get("loaded", -1)), tell(self, **fields))[1]
        assert await run.outcome() == "Stopped"
    finally:
        Writer.tell = tell
    run.check_saved(2)


async def test_a_stop_of_pools_on_the_same_devices_does_not_wait_for_a_replica_that_is_starting(start):
    """Loading a model takes longer than the grace period of a pod, in which the last updates must be saved."""
    run = start(COLOCATED | {"checkpoint": {"everyUpdates": 100}})
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(now())
        run.stop.set()

    def prepare(actor: Actor, name: str, number: int) -> None:
        if number == 2:
            actor.worker.opening.clear()
            asyncio.get_running_loop().call_later(1.0, stop)

    run.prepare = prepare
    run.trainer.worker.during["train"] = lambda: len(run.actors) == 2 and run.actors[0].die()
    assert await run.outcome() == "Stopped"
    assert run.ended_at - stopped[0] < 0.2 * OPEN_SECONDS
    run.check_saved(1)


async def test_a_stop_before_the_first_turn_of_generation_starts_no_replica(start):
    run = start(COLOCATED, probes=probes())
    run.trainer.worker.during["log_probs"] = run.stop.set
    assert await run.outcome() == "Stopped"
    assert run.actors == {}
    run.check_saved(0)
