"""The training loop.

    prompts ─► dispatch ─► rollout replicas ─► score ─► buffer ─► batch ─► train pool ─► publish ─► replicas
                  ▲                                       │                                │
                  └───────────── window ◄─────────────────┴─────────── version ◄───────────┘

waits on              unblocked by                                             deadline
batch: buffer         P finished groups, all due ones among them               async.stallSeconds without any group
train: the pool       its ranks' answers                                       async.stallSeconds
publish: replicas     every replica at the version; an evaluation in progress  weights.timeoutSeconds; stallSeconds
dispatch: window      a publication, or a discarded group                      never alone: the batch's wait covers it

FullyAsync, Colocated and SFT are this loop. In Colocated the window is one version and nothing runs ahead: training
waits until everything dispatched, evaluations too, is finished, so that the pools take turns. SFT has no rollout pool: batches come straight from the data, and nothing is published.

A publication runs beside the next batch; the one after it waits for it. Batch b trains version b // K, and the window
opens for new groups only when every replica has the version, so a group is never born older than its dispatch says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.engines.base import UpdateMetrics
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.pipeline.buffer import Blocked, Buffer
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import CheckpointRecord, Outcome, SpanKind, SpanRecord
from qwen35_trainer.runtime.assembly import ScoredGroup, TokenAge, assemble
from qwen35_trainer.runtime.calls import Stalled
from qwen35_trainer.runtime.checkpoint import CheckpointStore, Progress
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.generation import Generation
from qwen35_trainer.runtime.live import LiveFields
from qwen35_trainer.runtime.measures import UpdateTimes, evaluation_record, supervised_evaluation_record, update_record
from qwen35_trainer.runtime.meter import PoolMeter
from qwen35_trainer.runtime.schedule import learning_rate
from qwen35_trainer.runtime.supervised import Supervised
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.spec import TrainingSpec


@dataclass(frozen=True)
class Next:
    """A batch that is about to be trained, and where it came from."""

    batch: TrainBatch
    age: TokenAge
    groups: Sequence[ScoredGroup]
    waited: float


@dataclass
class TrainingLoop:
    """Runs from `update` to `updates_total`, or until `stop` is set. Either `generation` or `supervised` feeds it."""

    spec: TrainingSpec
    window: Window
    buffer: Buffer
    train: TrainPool
    recorder: Recorder
    checkpoints: CheckpointStore
    clock: Clock
    updates_total: int
    generation: Generation | None
    supervised: Supervised | None
    validation: Sequence[EncodedPrompt]
    stop: asyncio.Event
    live: LiveFields
    update: int = 0
    _times: UpdateTimes = field(default_factory=UpdateTimes)
    _busy: PoolMeter = field(default_factory=lambda: PoolMeter(workers=1))
    _updated: float = field(default_factory=time.time)
    _saved_at: int = field(init=False)
    _publishing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._saved_at = self.update

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return self.update // self.spec.async_.requireBatches if self.generation is None else self.buffer.batch

    @property
    def version(self) -> int:
        """Version that the next batch trains; 0 where nothing is published."""
        return 0 if self.generation is None else self.window.version_of(self.buffer.batch)

    async def run(self) -> Outcome:
        """Train. Raises what made it impossible to go on."""
        async with asyncio.TaskGroup() as tasks:
            collectors = []
            if self.generation is not None:
                pool = self.generation.parts.pool
                collectors = [tasks.create_task(self.generation.collect(replica)) for replica in range(len(pool))]
                await self.generation.dispatch()
            if self.update == 0 and self.spec.evaluation.atStart and not self.stop.is_set():
                self._publishing = tasks.create_task(self._evaluate(0))
                if self.generation is None:
                    await self._publication_done()  # the train pool would take the first batch before it
            stopped = await self._train_all(tasks)
            await self._publication_done()
            for collector in collectors:
                collector.cancel()
        return "Stopped" if stopped else "Succeeded"

    async def _train_all(self, tasks: asyncio.TaskGroup) -> bool:
        """Batch after batch. Returns whether it was told to stop before the end."""
        while self.update < self.updates_total:
            upcoming = await self._next_batch()
            if upcoming is None:
                await self._publication_done()
                await self._save()
                return True
            await self._train(upcoming)
            if self.generation is not None and self.buffer.batch % self.spec.batches_per_version == 0:
                await self._publish(tasks, self.window.version_of(self.buffer.batch))
            elif self.generation is None and self._evaluation_due():
                await self._evaluate(self.update)
            if self._checkpoint_due():
                await self._save()
        if self.generation is not None and self.buffer.batch % self.spec.batches_per_version:
            await self._publish(tasks, self.window.version_of(self.buffer.batch) + 1)
        return False

    async def _next_batch(self) -> Next | None:
        """The next batch, as soon as it may leave; None when the run was told to stop."""
        started = time.time()
        if self.stop.is_set():
            return None
        if self.generation is None:
            assert self.supervised is not None
            return Next(self.supervised.batch(self.batch), TokenAge({}, 0), (), 0.0)
        if self.spec.mode == "Colocated":
            await self._publication_done()
            if not await self._generation_rests():
                return None
        news = self.generation.changes.count
        while isinstance(taken := self.buffer.take(), Blocked):
            if not await self._group_finished(taken, news):
                return None
            news = self.generation.changes.count
        if taken.discarded:
            await self.generation.discard(taken.discarded)
            await self.generation.dispatch()
        groups = self.generation.take(taken.groups)
        batch, age = assemble(
            groups,
            version=self.window.version_of(self.buffer.batch - 1),
            max_lag=self.window.max_version_lag,
            mask_old=self.spec.effective_async.onMissedDeadline == "MaskTokens",
            updates=self.spec.async_.requireBatches,
        )
        return Next(batch, age, groups, time.time() - started)

    async def _group_finished(self, blocked: Blocked, seen: int) -> bool:
        """Wait for news beyond those `seen`. False when the run was told to stop. Raises Stalled."""
        assert self.generation is not None
        limit = self.spec.async_.stallSeconds
        news = asyncio.create_task(self.generation.changes.beyond(seen))
        told = asyncio.create_task(self.stop.wait())
        done, left = await asyncio.wait({news, told}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        if not done:
            due = f"; groups {', '.join(map(str, blocked.due[:5]))} are due and run still" if blocked.due else ""
            raise Stalled(
                f"no group finished within spec.async.stallSeconds {limit:g}: {blocked.finished} of "
                f"{blocked.needed} are ready{due}. Raise it, or lower data.maxResponseTokens"
            )
        return news in done or not told.done()

    async def _train(self, upcoming: Next) -> None:
        rates = [
            learning_rate(self.spec.train.optimizer, self.update + step, self.updates_total)
            for step in range(upcoming.batch.updates)
        ]
        started = time.time()
        metrics: list[UpdateMetrics] = await self.train.train(upcoming.batch, rates)
        ended = time.time()
        self._busy.add(started, ended)
        self._span("train-0", "train", started, ended)
        self._times.trained(upcoming.waited, ended - started)
        generation = self.generation
        pipeline = None if generation is None else (self.buffer.counted, self.window.limit, generation.meter.read())
        trainer_idle, _ = self._busy.read()
        version = 0 if generation is None else self.window.version_of(self.buffer.batch - 1)
        seconds, self._updated = ended - self._updated, ended
        for step, measured in enumerate(metrics):
            self.update += 1
            self.recorder.append(
                update_record(
                    measured,
                    step=step,
                    update=self.update,
                    updates_total=self.updates_total,
                    version=version,
                    time=self.clock.now(),
                    seconds=seconds,
                    batch=upcoming.batch,
                    age=upcoming.age,
                    groups=upcoming.groups,
                    times=self._times,
                    pipeline=pipeline,
                    trainer_idle=trainer_idle,
                )
            )
        self._times = UpdateTimes()

    async def _publish(self, tasks: asyncio.TaskGroup, version: int) -> None:
        """Copy the weights now; give them to the replicas beside the next batch."""
        await self._publication_done()
        started = time.time()
        weights = await self.train.publication(version)
        update, evaluate = self.update, self._evaluation_due()  # now: the next batch may be over before its turn comes
        generation = self.generation
        assert generation is not None

        async def publish() -> None:
            if not self.spec.effective_async.partialRollout:
                await self._generation_rests()  # every sequence comes from one version
            await generation.parts.pool.publish(weights)
            self._span("publish", "publish", started, time.time(), f"version {version}", version)
            self._times.published(time.time() - started)
            self.buffer.publish(version)
            await generation.dispatch()
            if evaluate:
                await self._evaluate(update)

        self._publishing = tasks.create_task(publish())

    async def _publication_done(self) -> None:
        """Wait for the publication, or evaluation, that runs beside training. Raises Stalled."""
        if self._publishing is None:
            return
        limit = self.spec.async_.stallSeconds
        _, running = await asyncio.wait({self._publishing}, timeout=limit)
        if running:
            raise Stalled(
                f"a publication or an evaluation did not end within spec.async.stallSeconds {limit:g}. "
                "Raise it, or lower rewards[].timeoutSeconds"
            )
        self._publishing = None

    async def _generation_rests(self) -> bool:
        """Wait until nothing is being generated or scored. False when the run was told to stop. Raises Stalled."""
        generation = self.generation
        assert generation is not None
        while generation.running:
            seen, dispatched = generation.changes.count, len(self.buffer.pending)
            if not await self._group_finished(Blocked(dispatched - generation.running, dispatched), seen):
                return False
        return True

    def _evaluation_due(self) -> bool:
        every = self.live.now.evaluationEveryUpdates
        step = self.spec.async_.requireBatches * self.spec.async_.updatesPerSync
        return self.update >= self.updates_total or bool(every and self.update % every < step and self.update >= every)

    async def _evaluate(self, update: int) -> None:
        """Held-out accuracy of the weights after `update`: no publication happens until it is done."""
        started = time.time()
        if self.supervised is not None and (batch := self.supervised.validation) is not None:
            loss = await self.train.negative_log_likelihood(batch)
            self.recorder.append(
                supervised_evaluation_record(loss, update=update, samples=batch.samples, time=self.clock.now())
            )
        elif self.generation is not None and self.validation:
            results = await self.generation.evaluate(self.validation)
            version = self.generation.parts.pool.version
            self.recorder.append(evaluation_record(results, update=update, version=version, time=self.clock.now()))
        else:
            return
        self._span("evaluate", "evaluate", started, time.time(), f"update {update}")

    def _checkpoint_due(self) -> bool:
        every = self.live.now.checkpointEveryUpdates
        return self.update >= self.updates_total or self.update // every > self._saved_at // every

    async def _save(self) -> None:
        """Checkpoint what is trained, and which prompts are on their way."""
        started = time.time()
        generation = self.generation
        progress = Progress(
            update=self.update,
            batch=self.batch,
            position=0 if generation is None else generation.parts.feed.position,
            pending=() if generation is None else generation.pending_positions,
            elapsed=self.clock.now(),
        )
        self.checkpoints.keep = self.live.now.checkpointKeep
        path = await self.checkpoints.save(progress, self.train.save)
        self._saved_at = self.update
        self._span("train-0", "checkpoint", started, time.time())
        self.recorder.append(
            CheckpointRecord(
                update=self.update,
                version=self.version,
                time=self.clock.now(),
                path=str(path),
                seconds=time.time() - started,
            )
        )

    def _span(
        self, lane: str, kind: SpanKind, start: float, end: float, label: str = "", version: int | None = None
    ) -> None:
        at = self.clock.at
        self.recorder.append(
            SpanRecord(lane=lane, kind=kind, start=at(start), end=at(end), label=label, version=version)
        )
