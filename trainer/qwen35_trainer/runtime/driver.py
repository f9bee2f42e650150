"""The driver: the Ray actor that owns the pools and runs the loop.

    qwen35 run ──► Driver ──► rollout workers
       ▲ follow      │  └───► train workers
       └─────────────┘ records, phase, result

The driver never imports torch, because the train pool computes the updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import ray

from qwen35_trainer.contract import Control
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.engines.batch_division import BatchDivision
from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.requests import Request
from qwen35_trainer.progress.metrics_file import has_evaluation
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import MAX_TRACEBACK_CHARACTERS, FinishRecord, RunOutcome, RunRecord, writable
from qwen35_trainer.progress.sinks import open_sinks
from qwen35_trainer.progress.sinks.sink import Sink
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardsSetup, usable_cores
from qwen35_trainer.rewards.scoring import Scoring
from qwen35_trainer.rollout.vllm_environment import reuse_freed_tensors
from qwen35_trainer.runtime.background import done_before
from qwen35_trainer.runtime.calls import ActorLost, Stalled
from qwen35_trainer.runtime.checkpoint_store import CheckpointError, StorageFailed
from qwen35_trainer.runtime.device_turns import DeviceTurns, Side
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.generation import Generation, GenerationParts
from qwen35_trainer.runtime.job import Job, RunData, coordinator_settings, replica_slots, scheduling_start
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.loop import TrainingLoop
from qwen35_trainer.runtime.measurements import TrainingClock
from qwen35_trainer.runtime.probe_schedule import ProbeSchedule
from qwen35_trainer.runtime.process import Process, collect_seldom, starting
from qwen35_trainer.runtime.replica_node import NodeActors, ReplicaNode
from qwen35_trainer.runtime.response_samples import Sampler
from qwen35_trainer.runtime.rollout_pool import LANE_PREFIX, PoolLimits, RolloutPool, RolloutReplica, replica_names
from qwen35_trainer.runtime.rollout_worker import RolloutWorker
from qwen35_trainer.runtime.site import (
    ActorPoolName,
    SharedPlace,
    neighbour_groups,
    reserve_nodes,
    reserved_options,
    shared_places,
    worker_cpus,
    worker_options,
)
from qwen35_trainer.runtime.supervised import Supervised, SupervisedLoop
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_session import LiveFields, TrainSession, first_kl_coefficient
from qwen35_trainer.runtime.train_worker import SAVING, TrainWorker
from qwen35_trainer.weights.probe import probe_sequences
from qwen35_trainer.weights.transports import choose

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.1
"""Time, in seconds, for which `follow` collects records before it returns them.

If `follow` returned after every record, the process that calls it would take a CPU core from the training.
"""

START_SECONDS = 600.0
"""Maximum time, in seconds, in which the workers of a pool start, import their modules and load the model."""


@dataclass(frozen=True)
class DriverState:
    """The answer of `Driver.follow`: the driver's state, and the records that the caller does not have yet."""

    records: tuple[RunRecord, ...]
    phase: str
    over: bool
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a rollout replica → hosts where the replica runs, one for each of its nodes. Empty until replicas have joined."""
    drained: frozenset[str] = frozenset()
    """Names of the replicas on leaving hosts that hold no sequences."""


class Broadcast:
    """A metrics sink that keeps records until the process that follows the run has received them."""

    def __init__(self) -> None:
        self._records: list[RunRecord] = []
        self._dropped = 0
        self.changed = asyncio.Event()

    def write(self, record: RunRecord) -> None:
        self._records.append(record)
        self.changed.set()

    def after(self, seen: int) -> tuple[RunRecord, ...]:
        """Return the records of the run that come after its first `seen` records, and drop the first `seen` records.

        seen: number of records that the caller, the process that follows the run, has already received. Raises
        ValueError if later records were dropped already, because another process also follows the run.
        """
        if seen < self._dropped:
            raise ValueError(f"record {seen} was dropped: one process follows a run")
        del self._records[: seen - self._dropped]
        self._dropped = seen
        return tuple(self._records)

    def close(self) -> None:
        self.changed.set()


class Driver(Process):
    """The Ray actor that coordinates a run: it starts the pools and runs the training loop.

    Call `run` once. `follow`, `obey` and `stop` may be called while `run` runs.
    """

    def __init__(self, job: Job, data: Sequence[ray.ObjectRef[RunData]]) -> None:
        super().__init__("driver", job.folder.logs)
        reuse_freed_tensors()  # the tokens of the next reports and batches need the same sizes
        collect_seldom()
        self._job = job
        (self._data,) = data  # in a sequence, because Ray would fetch a bare reference before this starts
        self._stop = asyncio.Event()
        self._live = LiveFields.of(job.spec)
        self._leaving: frozenset[str] = frozenset()
        self._replicas = job.spec.rollout_replicas
        self._pool: RolloutPool | None = None
        self._coordinator: Coordinator | None = None
        self._places: dict[str, SharedPlace] = {}  # by name of the replica; only in mode Colocated
        self._broadcast = Broadcast()
        self._phase = "starting"
        self._over = False

    async def run(self) -> FinishRecord:
        """Run the training until it ends, and return its final record. A failed training raises no exception.

        After a failure the record contains the reason, and the log contains the traceback.
        """
        job = self._job
        clock = TrainingClock(job.started, job.resume.progress.elapsed if job.resume else 0.0)
        finish: FinishRecord | None = None
        try:
            # In a thread: opening reads the earlier records of a resumed run.
            sinks = [*self._sinks(), self._broadcast]
            with await asyncio.to_thread(Recorder, job.folder.metrics, sinks, job.writer) as recorder:
                finish = await self._finish(recorder, clock)
                recorder.append(finish)
        except Exception as error:
            logger.exception("the records could not be written")
            if finish is None or finish.outcome != "Failed":
                finish = _failed(error, clock)
        finally:
            self._over = True  # in any case, because the follower waits for it
            self._broadcast.changed.set()
        return finish

    async def _finish(self, recorder: Recorder, clock: TrainingClock) -> FinishRecord:
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

    async def follow(self, seen: int, wait_seconds: float) -> DriverState:
        """Return the state of the driver, and all records except the first `seen`.

        Only one process may call this method. If there is no new record, the method waits for one, for
        at most `wait_seconds`.
        """
        if not self._broadcast.after(seen) and not self._over:
            self._broadcast.changed.clear()
            with contextlib.suppress(TimeoutError):  # no record yet, but the phase may have changed
                await asyncio.wait_for(self._broadcast.changed.wait(), wait_seconds)
        if not self._over:
            await asyncio.sleep(GATHER_SECONDS)
        over = self._over  # read before the records: the follower does not call again when it is true
        hosts = {} if self._pool is None else self._pool.hosts
        return DriverState(self._broadcast.after(seen), self._phase, over, hosts, self._drained())

    def _drained(self) -> frozenset[str]:
        """Return the names of the replicas on leaving hosts that hold no sequences."""
        if self._pool is None or self._coordinator is None:
            return frozenset()
        names = self._pool.names
        return frozenset(names[number] for number in self._coordinator.drained if number in names)

    def obey(self, control: Control) -> None:
        """Apply the operator's orders: live settings, the size of the rollout pool, and the pods that will leave.

        Live settings take effect at the next update, the other orders immediately. For an order to stop, the caller
        must call `stop` instead.
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
        """Request that the run finishes the current batch, saves a checkpoint, and ends. Returns immediately."""
        self._phase = "stopping after this update"
        self._stop.set()

    async def _train(self, recorder: Recorder, clock: TrainingClock) -> RunOutcome:
        if self._stop.is_set() and not self._must_save:
            return "Stopped"
        async with self._scoring() as scoring:  # its processes start before those of the pools
            return await self._train_and_score(recorder, clock, scoring)

    async def _train_and_score(self, recorder: Recorder, clock: TrainingClock, scoring: Scoring) -> RunOutcome:
        self._phase = "starting workers"
        replicas, train_actors = self._start_workers()
        train = self._train_pool(train_actors)
        self._phase = "loading the model"
        limit = max(START_SECONDS, self._job.spec.async_.stallSeconds)
        loading = asyncio.ensure_future(train.start(limit))  # replicas join later, each when it is ready
        opening = asyncio.ensure_future(self._open(scoring))
        if not await self._waited(opening):
            loading.cancel()
            return "Stopped"
        spec = self._job.spec
        data = opening.result()
        if not await self._waited(loading):
            return "Stopped"
        if self._shares_devices:
            self._places = self._shared_places(train)
        training = TrainSession(
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
            kl_coefficient=_kl_coefficient(self._job),
            begins_saved=self._job.resume is not None and not self._must_save,
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
        loop = self._loop(training, data, scoring)
        if training.update >= training.updates_total:  # in a thread, because the file may be long
            evaluated = partial(has_evaluation, self._job.folder.metrics, training.update)
            loop.has_last_evaluation = await asyncio.to_thread(evaluated)
        return await loop.run(await train.publication(loop.coordinator.version), replicas)

    def _scoring(self) -> Scoring:
        """Return the object that scores responses. In SFT it has no rewards and starts no process."""
        spec = self._job.spec
        # One batch. After a resume the rewards have worked before, so a failure may only be a service that is not ready yet.
        trial = 0 if self._job.resume else spec.groups_per_batch * spec.algorithm.groupSize
        setup = RewardsSetup.of(spec.rewards, [*spec.data.train, *spec.data.validation], self._job.base)
        limits = ProcessLimits.of(usable_cores()) if spec.rewards else ProcessLimits(scoring=0)
        return Scoring(setup, limits, trial=trial, logs=self._job.folder.logs)

    async def _open(self, scoring: Scoring) -> RunData:
        """Fetch the data of the run, and start the scoring processes. Returns the data.

        The data are fetched in a thread, while the workers load the model.
        """
        with starting():
            data: RunData = await asyncio.to_thread(ray.get, self._data)
        await scoring.open(data.decoder)
        return data

    async def _waited(self, work: asyncio.Future[Any]) -> bool:
        """Wait for `work` before the training begins. Returns False if the run has to stop before `work` is done.

        Stopping loses nothing, because nothing has trained. A run that must save a checkpoint does not stop here.
        """
        if self._must_save:
            await work
            return True
        return await done_before(self._stop, work)

    @property
    def _must_save(self) -> bool:
        """Whether the run must save a checkpoint even if nothing trains.

        This is so if the run continues from a checkpoint in another folder, because the folder of its checkpoints
        has none yet.
        """
        resume, checkpoints = self._job.resume, self._job.checkpoints
        if resume is None or checkpoints is None:
            return False
        return resume.path.parent.resolve() != checkpoints.folder.resolve()

    def _start_workers(self) -> tuple[list[RolloutReplica], list[Any]]:
        spec = self._job.spec
        # Replicas that share devices start on those of the train workers, when these have given their memory back.
        names = [] if self._shares_devices else self._replica_names
        rollout = [self._spawn(number, name, name.startswith(LANE_PREFIX)) for number, name in enumerate(names)]
        options = worker_options(self._job, "train") | {"concurrency_groups": {SAVING: 1}}
        worker, common = ray.remote(**options)(TrainWorker), self._common("train")
        # In a cluster, pods share no memory. Both pools are in one pod if they share the devices of one node.
        one_pod = self._shares_devices and spec.train.nodes == 1
        transport = choose(spec.publication.transport, one_host=one_pod or not self._job.in_cluster)
        publishing = {"transport": transport, "publications": self._job.publications}
        return rollout, [
            worker.remote(spec, number, pictures=self._job.pictures, **publishing, **common)
            for number in range(spec.world_size)
        ]

    @property
    def _shares_devices(self) -> bool:
        return self._job.spec.mode == "Colocated"

    @property
    def _replica_names(self) -> list[str]:
        spec = self._job.spec
        return [*replica_names(spec.rollout_replicas), *replica_names(spec.lane_replicas, lane=True)]

    def _shared_places(self, train: TrainPool) -> dict[str, SharedPlace]:
        """Return, by name of a replica, the devices of train workers that the replica shares, and their node."""
        names, spec = self._replica_names, self._job.spec
        sizes = [spec.replica_devices(lane=name.startswith(LANE_PREFIX)) for name in names]
        return dict(zip(names, shared_places(train.locations, sizes), strict=True))

    def _train_pool(self, workers: Sequence[Any]) -> TrainPool:
        spec = self._job.spec
        division = BatchDivision.of(spec, spec.data_parallel)
        groups = neighbour_groups(spec.train.parallelism, spec.world_size)
        return TrainPool(workers, spec.async_.stallSeconds, division, groups)

    def _common(self, pool: ActorPoolName, devices: int = 1) -> dict[str, Any]:
        job = self._job
        pods: ActorPoolName = "train" if self._shares_devices else pool
        threads = (worker_cpus(job, pods) if job.in_cluster else job.threads) * devices
        return {"vocabulary": job.vocabulary, "base": job.base, "threads": threads, "logs": job.folder.logs}

    def _spawn(self, number: int, name: str, lane: bool) -> RolloutReplica:
        """Start a rollout replica, and return it.

        number: number of the replica, which no other replica has. name: name of the replica; a replica that replaces a
        lost one has the same name and another number. lane: whether the replica belongs to the straggler lane.
        """
        job, rollout = self._job, self._job.spec.rollout
        assert rollout is not None
        attempt = int(job.attempt, 16) if job.resume else 0  # a run that starts from scratch can be repeated
        devices = job.spec.replica_devices(lane=lane)
        # vLLM has a process for each device. The Torch engine is one process, which is faster because of its threads.
        threads_of = devices if rollout.engine == "Torch" else 1
        place, nodes = self._places.get(name), self._further_nodes(name, lane=lane)
        options = (
            worker_options(job, "rollout", lane=lane, place=place)
            if nodes is None
            else reserved_options(job, nodes.reserved, 0, lane=lane)
        )
        actor = ray.remote(**options)(RolloutWorker).remote(
            job.spec,
            name,
            life=(attempt, number),
            end_token=job.end_token,
            devices=devices,
            nodes=() if nodes is None else nodes.actors,
            pictures=job.replicas_read_pictures,
            shared=None if place is None else place.devices,
            **self._common("rollout", threads_of),
        )
        return RolloutReplica(number, name, actor, lane, nodes)

    def _further_nodes(self, name: str, *, lane: bool) -> NodeActors | None:
        """Start the actors of a replica's further nodes, and return them; None if the replica is not larger than a node."""
        job = self._job
        if (count := job.spec.nodes_of_replica(lane=lane)) == 1:
            return None
        reserved, common = reserve_nodes(job, lane=lane), self._common("rollout")
        actors = [
            ray.remote(**reserved_options(job, reserved, node, lane=lane))(ReplicaNode).remote(
                f"{name}-node-{node}", common["logs"], common["threads"]
            )
            for node in range(1, count)
        ]
        return NodeActors(tuple(actors), reserved)

    def _supervised(self, training: TrainSession, data: RunData) -> SupervisedLoop:
        job, spec = self._job, self._job.spec
        prompts = job.updates_total * spec.train.batch.promptsPerUpdate
        length = len(data.examples)
        order = PromptOrder(length, seed=spec.seed, epochs=-(-prompts // length), shuffle=spec.data.shuffle)
        supervised = Supervised(
            data.examples, data.held_out, order, size=spec.groups_per_batch, updates=spec.async_.updatesPerBatch
        )
        return SupervisedLoop(supervised, training, self._stop, self._must_save)

    def _loop(self, training: TrainSession, data: RunData, scoring: Scoring) -> TrainingLoop:
        spec = self._job.spec
        inbox: asyncio.Queue[on.Event | Request] = asyncio.Queue()
        start = scheduling_start(self._job)
        order = PromptOrder(len(data.prompts), seed=spec.seed, epochs=None, shuffle=spec.data.shuffle)
        for position in {start.position, *start.pending}:
            order.prepare(position)
        parts = GenerationParts(
            spec,
            data.prompts,
            data.validation,
            order,
            scoring,
            training.recorder,
            training.clock,
            inbox.put_nowait,
            self._job.stop_tokens,
        )
        generation = Generation(parts, self._replicas)
        assert spec.rollout is not None
        self._pool = generation.pool = RolloutPool(
            self._spawn,
            generation,
            PoolLimits(
                slots=replica_slots(spec),
                open=max(START_SECONDS, spec.async_.stallSeconds),
                publish=spec.publication.timeoutSeconds,
                too_few=spec.async_.stallSeconds,
            ),
            target=self._replicas,
            minimum=max(1, spec.replicas_on(spec.min_rollout_nodes)),
            lanes=spec.lane_replicas,
            replica_ranks=spec.rollout.tensorParallel,
            takes_turns=self._shares_devices,
        )
        self._pool.leave(self._leaving)
        self._coordinator = Coordinator(
            coordinator_settings(spec, self._job.updates_total),
            start,
            source_of=lambda position: data.prompts[order.prompt_index(position)].prompt.source,
            prompt_tokens_of=lambda position: len(data.prompts[order.prompt_index(position)].token_ids),
        )
        return TrainingLoop(
            coordinator=self._coordinator,
            generation=generation,
            training=training,
            journal=JournalFile(self._job.folder.journal, self._job.writer, spec.async_.stallSeconds),
            inbox=inbox,
            stop=self._stop,
            sampler=Sampler(self._job.folder.samples, data.decoder, self._job.writer),
            evaluates=bool(data.validation),
            probes=_probes(spec, data),
            turns=_turns(training, self._pool) if self._shares_devices else None,
        )


def _turns(training: TrainSession, replicas: RolloutPool) -> DeviceTurns:
    """Return the object that gives the devices to the two pools in turn. Each turn becomes a span in the timeline."""

    def span(side: Side, began: float, ended: float, label: str) -> None:
        training.span("devices", "turn", began, ended, f"{side}: {label}")

    return DeviceTurns(training.pool, replicas, span)


def _kl_coefficient(job: Job) -> float | None:
    """Return the coefficient of `algorithm.kl.adaptive` for the first batch; None if the coefficients are fixed.

    A run that resumes continues with the coefficient in its checkpoint. If the initial coefficient in the manifest has
    changed since, the run begins with the new one instead.
    """
    first = first_kl_coefficient(job.spec)
    saved = None if job.resume is None else job.resume.progress
    if first is None or saved is None or saved.kl_coefficient is None or saved.kl_first not in (None, first):
        return first
    return saved.kl_coefficient


def _probes(spec: TrainingSpec, data: RunData) -> ProbeSchedule | None:
    """Return the schedule of the run's probes. None: the manifest disables probes, or no prompt is suitable.

    Suitable prompts have at least two tokens, and neither images nor videos.
    """
    limit = spec.publication.maxLogProbDifference
    if not limit:
        return None
    texts = (each.token_ids for each in data.prompts if not (each.prompt.images or each.prompt.videos))
    sequences = probe_sequences(texts, spec.data.maxPromptTokens + spec.data.maxResponseTokens)
    if not sequences:
        logger.warning("replicas are not compared with the trainer: every prompt has pictures or fewer than two tokens")
        return None
    return ProbeSchedule(sequences, limit)


async def _restore(train: TrainPool, path: Path) -> None:
    try:
        await train.restore(path)
    except (Stalled, ActorLost):
        raise
    except Exception as error:
        if reason_of(error) is FailureReason.OUT_OF_MEMORY:
            raise MemoryError(f"checkpoint {path} could not be loaded: {_message(error)}") from error
        # What the ranks raised may be wrapped by PyTorch, which keeps the number of an OSError in the text.
        kind = StorageFailed if isinstance(error, OSError) or "[Errno " in str(error) else CheckpointError
        raise kind(
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


def _failed(error: BaseException, clock: TrainingClock) -> FinishRecord:
    now, reason, message = clock.now(), reason_of(error), _message(error)
    if reason is FailureReason.UNEXPECTED_ERROR:
        message = f"{type(_only(error)).__name__}: {message}"
    return FinishRecord(
        outcome="Failed",
        message=writable(message),
        time=now,
        reason=reason,
        traceback=writable("".join(format_exception(_only(error))))[-MAX_TRACEBACK_CHARACTERS:],
        wall_time=clock.wall(now),
    )


def _only(error: BaseException) -> BaseException:
    """Return the only exception in an exception group, or in nested ones.

    A group of several exceptions is returned itself.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
