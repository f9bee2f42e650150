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
from pathlib import Path
from typing import Any

import ray

from qwen35_trainer.contract import Control
from qwen35_trainer.data.prompts import PromptOrder
from qwen35_trainer.pipeline.buffer import Buffer, OnMissedDeadline
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import FinishRecord, Outcome
from qwen35_trainer.progress.sinks import open_sinks
from qwen35_trainer.progress.sinks.base import Sink
from qwen35_trainer.rewards.build import build_scorer
from qwen35_trainer.rewards.scorer import Scorer
from qwen35_trainer.runtime.calls import Stalled, WorkerLost, answers
from qwen35_trainer.runtime.checkpoint import CheckpointError
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.generation import Generation, Parts
from qwen35_trainer.runtime.job import Data, Job
from qwen35_trainer.runtime.live import LiveFields
from qwen35_trainer.runtime.loop import TrainingLoop
from qwen35_trainer.runtime.news import Broadcast, News
from qwen35_trainer.runtime.process import Process
from qwen35_trainer.runtime.prompt_feed import PromptFeed
from qwen35_trainer.runtime.rollout_pool import RolloutPool
from qwen35_trainer.runtime.rollout_worker import RolloutWorker
from qwen35_trainer.runtime.supervised import Supervised
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_worker import TrainWorker

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.1
"""News are gathered for so long: a follower that woke for every record would take a core from the training."""

START_SECONDS = 600.0
"""Deadline of starting a pool: processes, imports, model load."""


class Driver(Process):
    """Ray actor. `run` once; `follow`, `obey` and `stop` at any time beside it."""

    def __init__(self, job: Job, data: Sequence[ray.ObjectRef[Data]]) -> None:
        super().__init__("driver", job.folder.logs)
        self._job = job
        (self._data,) = data  # in a sequence, because Ray would fetch a bare reference before this starts
        self._stop = asyncio.Event()
        self._live = LiveFields.of(job.spec)
        self._leaving: frozenset[str] = frozenset()
        self._pool: RolloutPool | None = None
        self._broadcast = Broadcast()
        self._phase = "starting"
        self._over = False

    async def run(self) -> FinishRecord:
        """The whole training. Never raises for a failed one: the record says so; the log has the traceback."""
        job = self._job
        clock = Clock(job.started, job.resume.progress.elapsed if job.resume else 0.0)
        finish: FinishRecord | None = None
        try:
            with Recorder(job.folder.metrics, [*self._sinks(), self._broadcast]) as recorder:
                finish = await self._finish(recorder, clock)
                recorder.append(finish)
        except Exception as error:
            logger.exception("the records could not be written")
            if finish is None or finish.outcome != "Failed":
                finish = _failed(error, clock)
        finally:
            self._over = True  # whatever happened: the follower waits for it
            self._broadcast.changed.set()
        return finish

    async def _finish(self, recorder: Recorder, clock: Clock) -> FinishRecord:
        try:
            return FinishRecord(outcome=await self._train(recorder, clock), message="", time=clock.now())
        except Exception as error:
            logger.exception("the training failed")
            return _failed(error, clock)

    def _sinks(self) -> list[Sink]:
        job = self._job
        return open_sinks(
            job.spec.tracking,
            folder=job.folder.root,
            name=job.manifest.metadata.name,
            run_id=job.folder.identity,
            config=job.spec.model_dump(mode="json", by_alias=True),
        )

    async def follow(self, seen: int, wait_seconds: float) -> News:
        """Records after the first `seen`; waits for one. There is one follower."""
        if not self._broadcast.after(seen) and not self._over:
            self._broadcast.changed.clear()
            with contextlib.suppress(TimeoutError):  # no record yet: the phase may be news
                await asyncio.wait_for(self._broadcast.changed.wait(), wait_seconds)
        if not self._over:
            await asyncio.sleep(GATHER_SECONDS)
        over = self._over  # before the records: what comes after it would be lost
        return News(self._broadcast.after(seen), self._phase, over, {} if self._pool is None else self._pool.hosts)

    def obey(self, control: Control) -> None:
        """Take over what the operator asks: live fields at the next update, leaving pods at the next group. `stop` is a
        call of its own, since signals ask for it too.
        """
        self._live.now = control.live or LiveFields.of(self._job.spec).now
        self._leaving = frozenset(control.leaving)
        if self._pool is not None:
            self._pool.leaving = self._leaving

    def stop(self) -> None:
        """Finish the current update, save, and end."""
        self._phase = "stopping after this update"
        self._stop.set()

    async def _train(self, recorder: Recorder, clock: Clock) -> Outcome:
        self._phase = "starting workers"
        rollout_actors, train_actors = self._start_workers()
        train = TrainPool(train_actors, self._job.spec.async_.stallSeconds)
        self._phase = "loading the model"
        loading = asyncio.gather(
            answers(
                [actor.ready.remote() for actor in rollout_actors],
                of="the rollout pool",
                act="loading the model",
                seconds=START_SECONDS,
            ),
            train.start(START_SECONDS),
        )
        spec = self._job.spec
        sources = [*spec.data.train, *spec.data.validation]
        # In threads, since both take seconds: the workers load meanwhile.
        data: Data = await asyncio.to_thread(ray.get, self._data)
        scorer = await asyncio.to_thread(build_scorer, spec.rewards, sources, self._job.base)
        with scorer:
            if not await self._loaded(loading):
                return "Stopped"
            hosts, _ = loading.result()
            loop = self._loop(recorder, clock, train, rollout_actors, hosts, data, scorer)
            await self._begin(loop, train)
            if not self._stop.is_set():
                self._phase = "generating the first batch" if rollout_actors else "training"
            return await loop.run()

    async def _loaded(self, loading: asyncio.Future[Any]) -> bool:
        """Wait for the workers. False when told to stop meanwhile: nothing is trained, so nothing is lost.

        A run that continues a checkpoint of another folder goes on until it has saved one in its own.
        """
        resume = self._job.resume
        if resume is not None and resume.path.parent != self._job.checkpoints.folder:
            await loading
            return True
        told = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if self._stop.is_set():
            loading.cancel()
            return False
        await loading
        return True

    def _start_workers(self) -> tuple[list[Any], list[Any]]:
        job, spec = self._job, self._job.spec
        common = {"vocabulary": job.vocabulary, "base": job.base, "threads": job.threads, "logs": job.folder.logs}
        attempt = job.resume.progress.update if job.resume else 0
        rollout = [
            _actor(RolloutWorker).remote(spec, index, attempt=attempt, end_token=job.end_token, **common)
            for index in range(spec.rollout_replicas)
        ]
        return rollout, [_actor(TrainWorker).remote(spec, rank, **common) for rank in range(spec.world_size)]

    def _loop(
        self,
        recorder: Recorder,
        clock: Clock,
        train: TrainPool,
        rollout_actors: Sequence[Any],
        hosts: Sequence[str],
        data: Data,
        scorer: Scorer,
    ) -> TrainingLoop:
        job, spec = self._job, self._job.spec
        knobs = spec.effective_async
        window = Window(spec.groups_per_batch, spec.batches_per_version, knobs.stalenessThreshold, knobs.maxVersionLag)
        buffer = Buffer(window, OnMissedDeadline(knobs.onMissedDeadline))
        prompts = job.updates_total * spec.train.batch.promptsPerUpdate
        length = len(data.examples) or len(data.prompts)
        order = PromptOrder(length, seed=spec.seed, epochs=-(-prompts // length), shuffle=spec.data.shuffle)
        progress = job.resume.progress if job.resume else None
        generation = supervised = None
        if spec.mode == "SFT":
            supervised = Supervised(
                data.examples, data.held_out, order, size=spec.groups_per_batch, updates=spec.async_.requireBatches
            )
        else:
            feed = PromptFeed(prompts, progress.position, progress.pending) if progress else PromptFeed(prompts)
            self._pool = pool = RolloutPool(
                rollout_actors,
                hosts,
                call_seconds=spec.async_.stallSeconds,
                publish_seconds=spec.weights.timeoutSeconds,
            )
            pool.leaving = self._leaving
            generation = Generation(
                Parts(spec, data.tokenizer, data.prompts, order, feed, buffer, pool, scorer, recorder, clock)
            )
        return TrainingLoop(
            spec=spec,
            window=window,
            buffer=buffer,
            train=train,
            recorder=recorder,
            checkpoints=job.checkpoints,
            clock=clock,
            updates_total=job.updates_total,
            generation=generation,
            supervised=supervised,
            validation=data.validation,
            stop=self._stop,
            live=self._live,
            update=progress.update if progress else 0,
        )

    async def _begin(self, loop: TrainingLoop, train: TrainPool) -> None:
        """Trainer at the checkpoint's weights, if there is one, and every replica at the trainer's."""
        if (checkpoint := self._job.resume) is not None:
            if not self._stop.is_set():
                self._phase = "restoring the checkpoint"
            await _restore(train, checkpoint.path)
            loop.buffer.start_at(checkpoint.progress.batch)
        if loop.generation is not None:
            await loop.generation.parts.pool.publish(await train.publication(loop.version))


async def _restore(train: TrainPool, path: Path) -> None:
    try:
        await train.restore(path)
    except (Stalled, WorkerLost):
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {_message(error)}. Resume with the model that wrote it, or name "
            "another checkpoint"
        ) from error


def _actor(worker: type[Process]) -> Any:  # noqa: ANN401  # Ray's actor classes are untyped
    # Threads, not Ray's CPU slots, share out this machine's cores; a lost worker ends the attempt.
    return ray.remote(num_cpus=0, max_restarts=0)(worker)


def _message(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_message(inner) for inner in error.exceptions)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = str(error)
    return text if text else type(error).__name__


def _failed(error: BaseException, clock: Clock) -> FinishRecord:
    return FinishRecord(outcome="Failed", message=_message(error), time=clock.now(), reason=_reason(error))


def _reason(error: BaseException) -> str:
    """The error's class; of a group, the first one's."""
    return _reason(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else type(error).__name__
