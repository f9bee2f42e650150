"""The driver: the Ray actor that owns the pools and runs the loop.

    qwen35 run ──► Driver ──► rollout workers
       ▲ follow      │  └───► train workers
       └─────────────┘ records, phase, result

It never imports torch: an update's arithmetic is the train pool's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompts import PromptOrder
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.pipeline.buffer import Buffer, OnMissedDeadline
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import FinishRecord, Record
from qwen35_trainer.progress.sinks import open_sinks
from qwen35_trainer.rewards.build import build_scorer
from qwen35_trainer.runtime.calls import answers
from qwen35_trainer.runtime.checkpoint import Checkpoint, CheckpointStore
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.generation import Generation, Parts
from qwen35_trainer.runtime.loop import TrainingLoop
from qwen35_trainer.runtime.process import Process
from qwen35_trainer.runtime.prompt_feed import PromptFeed
from qwen35_trainer.runtime.rollout_pool import RolloutPool
from qwen35_trainer.runtime.rollout_worker import RolloutWorker
from qwen35_trainer.runtime.supervised import Supervised
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_worker import TrainWorker
from qwen35_trainer.spec import Manifest, TrainingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
"""Deadline of starting a pool: processes, imports, model load."""


@dataclass(frozen=True)
class Job:
    """What a run is made of, prepared before Ray starts."""

    manifest: Manifest
    base: Path
    """The manifest's folder: relative paths start here."""
    folder: RunFolder
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[EncodedPrompt]
    validation: Sequence[EncodedPrompt]
    examples: Sequence[SupervisedExample]
    held_out: Sequence[SupervisedExample]
    updates_total: int
    resume: Checkpoint | None
    started: float
    """Wall-clock second at which the command began."""
    threads: int
    """Threads of each worker."""

    @property
    def spec(self) -> TrainingSpec:
        return self.manifest.spec


@dataclass(frozen=True)
class News:
    """What a follower has not seen yet."""

    records: tuple[Record, ...]
    phase: str
    over: bool


class _Broadcast:
    """A sink that keeps records for followers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.changed = asyncio.Event()

    def write(self, record: Record) -> None:
        self.records.append(record)
        self.changed.set()

    def close(self) -> None:
        self.changed.set()


class Driver(Process):
    """Ray actor. `run` once; `follow` and `stop` at any time beside it."""

    def __init__(self, job: Job) -> None:
        super().__init__("driver", job.folder.logs)
        self._job = job
        self._stop = asyncio.Event()
        self._broadcast = _Broadcast()
        self._phase = "starting"
        self._over = False

    async def run(self) -> FinishRecord:
        """The whole training. Never raises for a failed one: the record says so; the log has the traceback."""
        job = self._job
        clock = Clock(job.started, job.resume.progress.elapsed if job.resume else 0.0)
        sinks = open_sinks(
            job.spec.tracking,
            folder=job.folder.tensorboard,
            name=job.manifest.metadata.name,
            run_id=job.folder.root.name,
            config=job.spec.model_dump(mode="json", by_alias=True),
        )
        with Recorder(job.folder.metrics, [*sinks, self._broadcast]) as recorder:
            try:
                outcome = await self._train(recorder, clock)
                finish = FinishRecord(outcome=outcome, message="", time=clock.now())
            except Exception as error:
                logger.exception("the training failed")
                finish = FinishRecord(outcome="Failed", message=_message(error), time=clock.now())
            recorder.append(finish)
        self._over = True
        self._broadcast.close()
        return finish

    async def follow(self, seen: int, wait_seconds: float) -> News:
        """Records after the first `seen`; waits for one."""
        if len(self._broadcast.records) == seen and not self._over:
            self._broadcast.changed.clear()
            with contextlib.suppress(TimeoutError):  # no record yet: the phase may be news
                await asyncio.wait_for(self._broadcast.changed.wait(), wait_seconds)
        return News(tuple(self._broadcast.records[seen:]), self._phase, self._over)

    def stop(self) -> None:
        """Finish the current update, save, and end."""
        self._phase = "stopping after this update"
        self._stop.set()

    async def _train(self, recorder: Recorder, clock: Clock) -> Any:  # noqa: ANN401
        job, spec = self._job, self._job.spec
        self._phase = "starting workers"
        attempt = job.resume.progress.update if job.resume else 0
        common = {"vocabulary": len(job.tokenizer), "base": job.base, "threads": job.threads, "logs": job.folder.logs}
        rollout_actors = [
            _actor(RolloutWorker).remote(spec, index, attempt=attempt, end_token=job.tokenizer.eos_token_id, **common)
            for index in range(spec.rollout_replicas)
        ]
        train_actors = [_actor(TrainWorker).remote(spec, rank, **common) for rank in range(spec.world_size)]
        train = TrainPool(train_actors, spec.async_.stallSeconds)
        scorer = await asyncio.to_thread(
            build_scorer, spec.rewards, [*spec.data.train, *spec.data.validation], job.base
        )
        with scorer:
            self._phase = "loading the model"
            ready = [actor.ready.remote() for actor in rollout_actors]
            await asyncio.gather(
                train.start(START_SECONDS),
                answers(ready, of="the rollout pool", act="loading the model", seconds=START_SECONDS),
            )
            loop = self._loop(recorder, clock, train, rollout_actors, scorer)
            if job.resume is not None:
                self._phase = "restoring the checkpoint"
                await self._restore(loop, train)
            self._phase = "generating the first batch" if rollout_actors else "training"
            return await loop.run()

    def _loop(
        self,
        recorder: Recorder,
        clock: Clock,
        train: TrainPool,
        rollout_actors: Sequence[Any],
        scorer: Any,  # noqa: ANN401
    ) -> TrainingLoop:
        job, spec = self._job, self._job.spec
        knobs = spec.effective_async
        window = Window(spec.groups_per_batch, spec.batches_per_version, knobs.stalenessThreshold, knobs.maxVersionLag)
        buffer = Buffer(window, OnMissedDeadline(knobs.onMissedDeadline))
        prompts = job.updates_total * spec.train.batch.promptsPerUpdate
        length = len(job.examples) if spec.mode == "SFT" else len(job.prompts)
        order = PromptOrder(length, seed=spec.seed, epochs=-(-prompts // length), shuffle=spec.data.shuffle)
        progress = job.resume.progress if job.resume else None
        generation = supervised = None
        if spec.mode == "SFT":
            supervised = Supervised(
                job.examples, job.held_out, order, size=spec.groups_per_batch, updates=spec.async_.requireBatches
            )
        else:
            feed = PromptFeed(prompts, progress.position, progress.pending) if progress else PromptFeed(prompts)
            pool = RolloutPool(
                rollout_actors, call_seconds=spec.async_.stallSeconds, publish_seconds=spec.weights.timeoutSeconds
            )
            generation = Generation(
                Parts(spec, job.tokenizer, job.prompts, order, feed, buffer, pool, scorer, recorder, clock)
            )
        return TrainingLoop(
            spec=spec,
            window=window,
            buffer=buffer,
            train=train,
            recorder=recorder,
            checkpoints=CheckpointStore(checkpoint_folder(job.folder, spec, job.base), spec.checkpoint.keep),
            clock=clock,
            updates_total=job.updates_total,
            generation=generation,
            supervised=supervised,
            validation=job.validation,
            stop=self._stop,
            update=progress.update if progress else 0,
        )

    async def _restore(self, loop: TrainingLoop, train: TrainPool) -> None:
        """Trainer, then replicas, at the checkpoint's weights."""
        assert self._job.resume is not None
        await train.restore(self._job.resume.path)
        loop.buffer.start_at(self._job.resume.progress.batch)
        if loop.generation is not None:
            version = loop.window.version_of(self._job.resume.progress.batch)
            await loop.generation.parts.pool.publish(await train.publication(version))


def checkpoint_folder(folder: RunFolder, spec: TrainingSpec, base: Path) -> Path:
    """Where the checkpoints of a run lie."""
    storage = spec.checkpoint.storage
    return folder.checkpoints if storage is None or storage.path is None else base / storage.path


def _actor(worker: type[Process]) -> Any:  # noqa: ANN401  # Ray's actor classes are untyped
    # Threads, not Ray's CPU slots, share out this machine's cores; a lost worker ends the attempt.
    return ray.remote(num_cpus=0, max_restarts=0)(worker)


def _message(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_message(inner) for inner in error.exceptions)
    text = str(error)
    return text if text else type(error).__name__
