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
from traceback import format_exception
from typing import Any

import ray

from qwen35_trainer.contract import Control
from qwen35_trainer.data.prompts import PromptOrder
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import TRACEBACK_CHARACTERS, FinishRecord, Outcome, writable
from qwen35_trainer.progress.sinks import open_sinks
from qwen35_trainer.progress.sinks.base import Sink
from qwen35_trainer.rewards.build import build_scorer
from qwen35_trainer.rewards.scorer import Scorer
from qwen35_trainer.runtime.calls import Stalled, WorkerLost, answers
from qwen35_trainer.runtime.checkpoint import CheckpointError
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.generation import Generation, Parts
from qwen35_trainer.runtime.job import Data, Job
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.live import LiveFields
from qwen35_trainer.runtime.loop import TrainingLoop
from qwen35_trainer.runtime.news import Broadcast, News
from qwen35_trainer.runtime.process import Process, starting
from qwen35_trainer.runtime.rollout_pool import LANE, Limits, Replica, RolloutPool, replica_names
from qwen35_trainer.runtime.rollout_worker import RolloutWorker
from qwen35_trainer.runtime.sampler import Sampler
from qwen35_trainer.runtime.scheduling import settings_of, slots_of, start_of
from qwen35_trainer.runtime.site import Pool, worker_cpus, worker_options
from qwen35_trainer.runtime.stopping import done_before
from qwen35_trainer.runtime.supervised import Supervised, SupervisedLoop
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_worker import SAVING, TrainWorker
from qwen35_trainer.runtime.training import Training

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
        self._replicas = job.spec.rollout_replicas
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
            outcome = await self._train(recorder, clock)
            now = clock.now()
            return FinishRecord(outcome=outcome, message="", time=now, wall_time=clock.wall(now))
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
        """Take over what the operator asks: live fields at the next update, the pool's size and leaving pods at once.
        `stop` is a call of its own, since signals ask for it too.
        """
        spec = self._job.spec
        self._live.now = control.live or LiveFields.of(spec).now
        self._leaving = frozenset(control.leaving)
        if control.rolloutNodes and spec.rollout is not None:
            self._replicas = spec.replicas_on(control.rolloutNodes)
        if self._pool is not None:
            self._pool.resize(self._replicas)
            self._pool.leave(self._leaving)

    def stop(self) -> None:
        """Finish the current update, save, and end."""
        self._phase = "stopping after this update"
        self._stop.set()

    async def _train(self, recorder: Recorder, clock: Clock) -> Outcome:
        if self._stop.is_set() and not self._must_save:
            return "Stopped"
        self._phase = "starting workers"
        replicas, train_actors = self._start_workers()
        train = TrainPool(train_actors, self._job.spec.async_.stallSeconds)
        self._phase = "loading the model"
        loading = asyncio.ensure_future(_load(replicas, train))
        opening = asyncio.ensure_future(self._open())
        if not await self._waited(opening):
            loading.cancel()
            return "Stopped"
        spec = self._job.spec
        data, scorer = opening.result()
        with scorer:
            if not await self._waited(loading):
                return "Stopped"
            training = Training(
                spec=spec,
                pool=train,
                recorder=recorder,
                checkpoints=self._job.checkpoints,
                clock=clock,
                live=self._live,
                exports=Exports(self._stop, spec.async_.stallSeconds),
                attempt=self._job.attempt,
                updates_total=self._job.updates_total,
                update=self._job.resume.progress.update if self._job.resume else 0,
            )
            began, ended = loading.result()
            training.span("train-0", "load", began, ended)
            if (checkpoint := self._job.resume) is not None:
                if not self._stop.is_set():
                    self._phase = "restoring the checkpoint"
                if not await self._waited(asyncio.ensure_future(_restore(train, checkpoint.path))):
                    return "Stopped"
            if not self._stop.is_set():
                self._phase = "generating the first batch" if replicas else "training"
            if spec.mode == "SFT":
                return await self._supervised(training, data).run()
            loop = self._loop(training, data, scorer)
            return await loop.run(await train.publication(loop.coordinator.version), replicas)

    async def _open(self) -> tuple[Data, Scorer]:
        """In threads, since both take seconds: the workers load meanwhile."""
        spec = self._job.spec
        sources = [*spec.data.train, *spec.data.validation]
        with starting():  # the tokenizer brings its library
            data: Data = await asyncio.to_thread(ray.get, self._data)
        # A batch. After a resume the rewards have worked before: what fails now may be a service that starts more slowly.
        trial = 0 if self._job.resume else spec.groups_per_batch * spec.algorithm.groupSize
        return data, await asyncio.to_thread(build_scorer, spec.rewards, sources, self._job.base, trial=trial)

    async def _waited(self, work: asyncio.Future[Any]) -> bool:
        """Wait until it is done. False when told to stop meanwhile: nothing is trained, so nothing is lost."""
        if self._must_save:
            await work
            return True
        return await done_before(self._stop, work)

    @property
    def _must_save(self) -> bool:
        """Also when nothing was trained: a run that continues a checkpoint of another folder saves one in its own."""
        resume = self._job.resume
        own = self._job.checkpoints  # false as long as there are none
        return resume is not None and own is not None and resume.path.parent != own.folder

    def _start_workers(self) -> tuple[list[Replica], list[Any]]:
        spec = self._job.spec
        names = [*replica_names(spec.rollout_replicas), *replica_names(spec.lane_replicas, lane=True)]
        rollout = [self._spawn(number, name, name.startswith(LANE)) for number, name in enumerate(names)]
        options = worker_options(self._job, "train") | {"concurrency_groups": {SAVING: 1}}
        worker, common = ray.remote(**options)(TrainWorker), self._common("train")
        return rollout, [
            worker.remote(spec, rank, pictures=self._job.pictures, **common) for rank in range(spec.world_size)
        ]

    def _common(self, pool: Pool, devices: int = 1) -> dict[str, Any]:
        job = self._job
        threads = (worker_cpus(job, pool) if job.in_cluster else job.threads) * devices
        return {"vocabulary": job.vocabulary, "base": job.base, "threads": threads, "logs": job.folder.logs}

    def _spawn(self, number: int, name: str, lane: bool) -> Replica:
        """Start a rollout replica. `number`: another for each that comes in the place of one that was lost."""
        job, rollout = self._job, self._job.spec.rollout
        assert rollout is not None
        attempt = job.resume.progress.update if job.resume else 0
        # On a CPU the lane is the faster for its threads, as it is for its devices elsewhere.
        devices = rollout.lane.tensorParallel if lane and rollout.lane else 1
        actor = ray.remote(**worker_options(job, "rollout"))(RolloutWorker).remote(
            job.spec, name, life=(attempt, number), end_token=job.end_token, **self._common("rollout", devices)
        )
        return Replica(number, name, actor, lane)

    def _supervised(self, training: Training, data: Data) -> SupervisedLoop:
        job, spec = self._job, self._job.spec
        prompts = job.updates_total * spec.train.batch.promptsPerUpdate
        length = len(data.examples)
        order = PromptOrder(length, seed=spec.seed, epochs=-(-prompts // length), shuffle=spec.data.shuffle)
        supervised = Supervised(
            data.examples, data.held_out, order, size=spec.groups_per_batch, updates=spec.async_.requireBatches
        )
        return SupervisedLoop(supervised, training, self._stop, self._must_save)

    def _loop(self, training: Training, data: Data, scorer: Scorer) -> TrainingLoop:
        spec = self._job.spec
        inbox: asyncio.Queue[on.Event] = asyncio.Queue()
        order = PromptOrder(len(data.prompts), seed=spec.seed, epochs=None, shuffle=spec.data.shuffle)
        parts = Parts(
            spec,
            data.tokenizer,
            data.prompts,
            data.validation,
            order,
            scorer,
            training.recorder,
            training.clock,
            inbox.put_nowait,
        )
        generation = Generation(parts, self._replicas)
        assert spec.rollout is not None
        self._pool = generation.pool = RolloutPool(
            self._spawn,
            generation,
            Limits(
                slots=slots_of(spec),
                start=START_SECONDS,
                call=spec.async_.stallSeconds,
                publish=spec.weights.timeoutSeconds,
            ),
            target=self._replicas,
            lanes=spec.lane_replicas,
        )
        self._pool.leave(self._leaving)
        return TrainingLoop(
            coordinator=Coordinator(
                settings_of(spec, self._job.updates_total),
                start_of(self._job),
                source_of=lambda position: data.prompts[order.prompt_index(position)].prompt.source,
            ),
            generation=generation,
            training=training,
            journal=JournalFile(self._job.folder.journal),
            inbox=inbox,
            stop=self._stop,
            sampler=Sampler(self._job.folder.samples, data.tokenizer),
            evaluates=bool(data.validation),
        )


async def _load(replicas: Sequence[Replica], train: TrainPool) -> tuple[float, float]:
    """Until all workers have the model. Returns when the train workers began and ended, in wall-clock seconds."""
    ready = answers(
        [replica.actor.ready.remote() for replica in replicas],
        of="the rollout pool",
        act="loading the model",
        seconds=START_SECONDS,
        names=[replica.name for replica in replicas],
    )
    span: tuple[float, float]
    _, span = await asyncio.gather(ready, train.start(START_SECONDS))
    return span


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


def _message(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_message(inner) for inner in error.exceptions)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = str(error)
    return text if text else type(error).__name__


def _failed(error: BaseException, clock: Clock) -> FinishRecord:
    now = clock.now()
    return FinishRecord(
        outcome="Failed",
        message=writable(_message(error)),
        time=now,
        reason=_reason(error),
        traceback=writable("".join(format_exception(_only(error))))[-TRACEBACK_CHARACTERS:],
        wall_time=clock.wall(now),
    )


def _only(error: BaseException) -> BaseException:
    """What a task group raised, without the groups around it where it is a single error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    """The error's class; of a group, the first one's."""
    return _reason(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else type(error).__name__
