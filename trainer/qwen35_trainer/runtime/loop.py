"""The training loop: passes events to the coordinator, and the coordinator's actions to the pools.

    replicas ─┐                                           ┌─► journal            before anything else, when a batch leaves
    scores   ─┼─► inbox ─► coordinator.handle ─► actions ─┼─► generation         Start, Move, Cancel, Publish
    trainer  ─┤                                           ├─► orders ─► trainer  Train, Copy, Checkpoint: one at a time
    signals  ─┘                                           └─► checkpoint         its writing: while the next batches train
                                                              probe              after a copy, while its publication runs

waits on              unblocked by                                   deadline
an event              replicas, scores, the trainer, a signal        async.stallSeconds without a scored group, trainer idle
an order, a probe     the answer of every train rank                 async.stallSeconds
a turn (Colocated)    the other pool sleeps                          see `device_turns.py`
a checkpoint: disks   every rank's part, written; then each step     async.stallSeconds
                      of `CheckpointStore.save`
the journal: disk     a write, flushed                               async.stallSeconds
a publication         every replica's report, or its replacement     publication.timeoutSeconds
too few replicas      other replicas join                            PoolLimits.too_few, see `rollout_pool.py`

The coordinator (`pipeline/`) decides what is dispatched, which groups a batch takes, and when weights are published.
FullyAsync and Colocated use this loop; SFT has no rollouts, and uses the loop in `supervised.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices, requests
from qwen35_trainer.pipeline.commands import Action, SchedulingSnapshot
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.journal import JOURNALLED_ACTIONS
from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.progress.records import RunOutcome
from qwen35_trainer.rewards.combiner import Failures
from qwen35_trainer.runtime.assembly import assemble
from qwen35_trainer.runtime.calls import Stalled
from qwen35_trainer.runtime.device_turns import DeviceTurns
from qwen35_trainer.runtime.generation import Generation
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.measurements import PipelineMeasures, ProbeMeasures, evaluation_record
from qwen35_trainer.runtime.probe_schedule import ProbeSchedule
from qwen35_trainer.runtime.response_samples import Sampler
from qwen35_trainer.runtime.reused_memory import ReusedMemory
from qwen35_trainer.runtime.rollout_pool import RolloutReplica
from qwen35_trainer.runtime.train_session import NextBatch, TrainSession
from qwen35_trainer.weights.probe import Probe
from qwen35_trainer.weights.published import PublishedWeights

logger = logging.getLogger(__name__)

_PROGRESS = (on.SequenceFinished, on.GroupScored, on.GroupFailed)
"""Events that show that generation makes progress. Each one restarts the time after which the run counts as stalled."""

type Order = do.TrainGroups | do.CopyWeights | do.SaveCheckpoint


class _Over(Exception):
    """Raised when the run has ended, to cancel the remaining tasks of the loop."""


def _end() -> None:
    raise _Over


@dataclass
class TrainingLoop:
    """The main loop of an RL run: passes events to the coordinator, and carries out its actions, until the run ends.

    All events and requests arrive in `inbox`.
    """

    coordinator: Coordinator
    generation: Generation
    training: TrainSession
    journal: JournalFile
    inbox: asyncio.Queue[on.Event | requests.Request]
    stop: asyncio.Event
    sampler: Sampler
    evaluates: bool
    """Whether the run has held-out prompts, and therefore evaluates."""
    has_last_evaluation: bool = False
    """Whether the weights after the last update have been evaluated, by this attempt or an earlier one."""
    probes: ProbeSchedule | None = None
    """Decides which versions get a probe. None: the log-probs of replicas are not compared with those of the
    trainer."""
    turns: DeviceTurns | None = None
    """Gives the devices to one pool at a time in mode Colocated. None in other modes."""
    _orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    _copies: dict[int, PublishedWeights] = field(default_factory=dict)  # copied, not sent yet
    _published: dict[int, float] = field(default_factory=dict)  # version → start of its publication
    _evaluations: dict[int, tuple[int, Sequence[int]]] = field(default_factory=dict)  # version → update, groups
    _scoring: set[asyncio.Task[None]] = field(default_factory=set)
    _reported: Counter[str] = field(default_factory=Counter)
    _batch_memory: ReusedMemory = field(default_factory=ReusedMemory)
    _idle_since: float = 0.0
    _looked_at: float = 0.0
    """Time, on the event loop's clock, at which `_stalls_after` last read the state of the rollout pool."""
    _had_too_few: bool = False
    """Whether the rollout pool had too few replicas at time `_looked_at`."""
    _waited: float = 0.0
    """Seconds that the train pool waited for its last batch."""
    _busy: int = 0
    """Number of orders to the train pool that are not finished."""
    _ended: bool = False

    async def run(self, weights: PublishedWeights, replicas: Iterable[RolloutReplica]) -> RunOutcome:
        """Run the loop until the run ends. Returns Succeeded after the last update and its evaluation, otherwise Stopped.

        If an earlier attempt made the last update and ended before its evaluation or export, only these are made.

        weights: the first version. replicas: replicas whose actors have started. Raises JournalNotWritten if the
        journal cannot be created, and Superseded if another attempt owns the output folder. Errors after that are
        raised in an ExceptionGroup.
        """
        training = self.training
        self._idle_since = asyncio.get_running_loop().time()
        await self.journal.begin(self.coordinator.snapshot, training.attempt)
        try:
            async with asyncio.TaskGroup() as tasks:
                self.generation.run(tasks)
                exporting = tasks.create_task(training.export_last(self.coordinator.version))
                tasks.create_task(self._train_pool(tasks))
                tasks.create_task(self._stop_when_ordered())
                if self._begins_with_evaluation and not self.stop.is_set():
                    self._ask_for_evaluation(self.coordinator.version)
                if (
                    training.update >= training.updates_total and not training.saved
                ):  # its checkpoint is in another folder
                    self.inbox.put_nowait(requests.TakeCheckpoint())
                self.generation.pool.run(tasks, weights, replicas)
                del weights  # a reference would keep the version in memory
                await self._drive(tasks)
                await self._last_scores(tasks)
                await exporting
                _end()
        except* _Over:
            pass
        finally:
            await self.journal.close()
            await asyncio.to_thread(self.sampler.close)
        return "Succeeded" if self._is_complete else "Stopped"

    @property
    def _begins_with_evaluation(self) -> bool:
        """Whether the weights with which the attempt begins have to be evaluated."""
        training = self.training
        if training.update < training.updates_total:
            return training.update == 0 and training.spec.evaluation.atStart
        return not self.has_last_evaluation

    @property
    def _is_complete(self) -> bool:
        """Whether a further attempt would have nothing to do: all updates are made, and the last one is evaluated."""
        training = self.training
        return training.update >= training.updates_total and (self.has_last_evaluation or not self.evaluates)

    async def _drive(self, tasks: asyncio.TaskGroup) -> None:
        while not self._ended:
            actions: list[Action] = []
            if inputs := await self._inputs():
                actions = self.coordinator.handle(*inputs)
            for action in actions:
                if isinstance(action, JOURNALLED_ACTIONS):
                    self.journal.add(action)
            if any(isinstance(action, do.TrainGroups) for action in actions):
                await self.journal.flush()
            await self._take_turn(actions)
            for action in actions:
                self._carry_out(action, tasks)

    async def _take_turn(self, actions: Sequence[Action]) -> None:
        """Give the devices to the replicas, if the pools share devices and `actions` need the replicas.

        First waits until the train pool has carried out its orders.
        """
        publishes = any(isinstance(action, do.PublishWeights) for action in actions)
        if self.turns is None or not (publishes or any(isinstance(action, do.StartSequences) for action in actions)):
            return
        await self._orders.join()
        await self.turns.begin_generation(reload=not publishes)
        self._idle_since = asyncio.get_running_loop().time()

    async def _inputs(self) -> list[on.Event | requests.Request]:
        """Wait for events and requests, and return all that have arrived.

        The list may be empty while the train pool is busy or the rollout pool has too few replicas. Otherwise Stalled
        is raised if no group finishes within `spec.async.stallSeconds`.
        """
        limit = self.training.spec.async_.stallSeconds
        try:
            # With a time-out of 0, wait_for would not look into the inbox.
            ready = not self.inbox.empty()
            inputs = [
                self.inbox.get_nowait()
                if ready
                else await asyncio.wait_for(self.inbox.get(), self._stalls_after(limit))
            ]
        except TimeoutError:
            if self._busy or self.generation.pool.has_too_few:
                return []  # the order under way has its own deadline, and so has the pool with too few replicas
            missing = self.coordinator.buffer.missing()
            due = f"; groups {', '.join(map(str, missing.due[:5]))} are due and still running" if missing.due else ""
            raise Stalled(
                f"no group finished within spec.async.stallSeconds {limit:g}: {missing.finished} of "
                f"{missing.needed} are ready{due}. Raise it, or lower data.maxResponseTokens"
            ) from None
        inputs += [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        if any(isinstance(each, _PROGRESS) for each in inputs):
            self._idle_since = asyncio.get_running_loop().time()
        return inputs

    def _stalls_after(self, limit: float) -> float:
        """Return the maximum time, in seconds, to wait for the next event before the run counts as stalled.

        limit: maximum time without progress, in seconds. Time does not count while the train pool carries out an order,
        or while the rollout pool has too few replicas.
        """
        now = asyncio.get_running_loop().time()
        if self._had_too_few:
            self._idle_since += now - max(self._looked_at, self._idle_since)
        self._looked_at, self._had_too_few = now, self.generation.pool.has_too_few
        if self._busy or self._had_too_few:
            return limit
        return max(0.0, self._idle_since + limit - now)

    def _carry_out(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        generation = self.generation
        match action:
            case notices.GroupDispatched():
                generation.dispatched(action)
            case do.StartSequences():
                generation.start(action)
            case do.MoveSequences():
                generation.move(action)
            case do.CancelSequences():
                generation.cancel(action)
            case notices.GroupLeft(group):
                generation.forget(group)
            case do.TrainGroups() | do.CopyWeights() | do.SaveCheckpoint():
                self._busy += 1
                self._orders.put_nowait(action)
            case do.PublishWeights(version):
                self._published[version] = time.time()
                generation.pool.publish(self._copies.pop(version))
            case notices.VersionPublished(version):
                self._arrived(version)
            case notices.VersionEvaluated(version):
                task = tasks.create_task(self._evaluate(version))
                self._scoring.add(task)
                task.add_done_callback(self._scoring.discard)
            case notices.EvaluationSkipped(version):
                self._skip_evaluation(version)
            case notices.RunEnded():
                self._ended = True

    # The train pool.

    async def _train_pool(self, tasks: asyncio.TaskGroup) -> None:
        """Carry out the orders to the train pool, one at a time, until cancelled.

        Before them, probe the first version.
        """
        self._busy += 1
        await self._probe(self.coordinator.version)
        if self.turns is not None:
            await self.turns.begin_generation(reload=False)  # the replicas start, and load the first version
        self._carried_out()
        now = asyncio.get_running_loop().time
        while True:
            idle_since, free_since = time.time(), now()
            order = await self._orders.get()
            if self.turns is not None:
                await self.turns.begin_training()
            match order:
                case do.TrainGroups():
                    self._waited = now() - free_since
                    await self._train(order, time.time() - idle_since)
                case do.CopyWeights(version):
                    await self._copy(version)
                    await self._probe(version)
                case do.SaveCheckpoint(snapshot):
                    copied = asyncio.Event()
                    tasks.create_task(self._save(snapshot, copied))
                    await copied.wait()  # the next order may change the weights
            self._orders.task_done()
            if not isinstance(order, do.SaveCheckpoint):  # `_save` is not over yet
                self._carried_out()

    async def _copy(self, version: int) -> None:
        started = time.time()
        needed = frozenset({*self.generation.pool.versions_in_use, *self._copies})
        self._copies[version] = await self.training.pool.publication(version, needed)
        self.training.times.copied(time.time() - started)
        self.inbox.put_nowait(on.WeightsCopied(version))

    async def _probe(self, version: int) -> None:
        """If a probe is due, let the train ranks compute the log-probs of the version that was just copied.

        The probe is sent to the replicas together with the version, or after it if the version was sent already.
        """
        probes, now = self.probes, asyncio.get_running_loop().time
        began = now()
        if probes is None or self.stop.is_set():
            return
        if not probes.is_due(began, self._waited):
            probes.skip()
            return
        probe = Probe(probes.sequences, await self.training.pool.log_probs(probes.sequences), probes.limit)
        probes.computed(began, now())
        self.training.times.copied(now() - began)
        if version in self._copies:
            self._copies[version] = replace(self._copies[version], probe=probe)
        else:
            self.generation.pool.probe(version, probe)

    def _carried_out(self) -> None:
        self._busy -= 1
        self._idle_since = asyncio.get_running_loop().time()

    async def _save(self, snapshot: SchedulingSnapshot, copied: asyncio.Event) -> None:
        await self.training.save(snapshot, self.coordinator.settings.window.version_of(snapshot.batch), copied)
        await self.journal.compact(snapshot.batch)
        self.inbox.put_nowait(on.CheckpointCompleted(snapshot.batch))
        self._carried_out()

    async def _train(self, order: do.TrainGroups, waited: float) -> None:
        settings, training = self.coordinator.settings, self.training
        # In the order of dispatch, which is that of the data. In that of completion, the first update of a batch would
        # get the shortest responses, and the last one the longest.
        groups = self.generation.take(sorted(order.groups))
        started = time.time()
        batch, age = await asyncio.to_thread(
            assemble,  # seconds for long responses, in which replicas wait for answers
            groups,
            version=order.version,
            max_lag=settings.window.max_version_lag,
            mask_old=settings.on_missed_deadline == "MaskTokens",
            updates=training.spec.async_.updatesPerBatch,
            mask_truncated=training.spec.algorithm.maskTruncated,
            greedy_last=training.spec.algorithm.has_greedy_baseline,
            memory=self._batch_memory,
        )
        training.times.assembled(time.time() - started)
        groups = [replace(group, choices=()) for group in groups]  # the batch has them; samples are written later
        await training.train(NextBatch(batch, order.version, age, groups, waited), self._pipeline)
        self.sampler.trained(groups, update=training.update, version=order.version)
        every = settings.window.batches_per_version
        version, rest = divmod(order.batch + 1, every)
        complete = rest == 0 or training.update >= training.updates_total
        if complete and training.evaluation_due(training.spec.async_.updatesPerBatch * every):
            self._ask_for_evaluation(version + (rest > 0))
        if training.checkpoint_due():
            self.inbox.put_nowait(requests.TakeCheckpoint())
        self.inbox.put_nowait(on.BatchTrained(order.batch))

    def _pipeline(self) -> PipelineMeasures:
        generation, buffer = self.generation, self.coordinator.buffer
        generation.meter.workers = max(1, len(generation.pool))
        idle, rate = generation.meter.read()
        untrained = (reason for reason in LeaveReason if reason is not LeaveReason.TRAINED)
        untrained_total = Counter({str(reason): self.coordinator.left_by_reason[reason] for reason in untrained})
        new, self._reported = untrained_total - self._reported, untrained_total
        failures, generation.failures = generation.failures, Failures()
        probe_results, generation.probe_results = tuple(generation.probe_results), []
        dropped, generation.probes_dropped = generation.probes_dropped, 0
        skipped = 0 if self.probes is None else self.probes.take_skipped()
        probes = ProbeMeasures(probe_results, skipped, dropped)
        lost, generation.replicas_lost = generation.replicas_lost, 0
        return PipelineMeasures(buffer.counted, buffer.window.limit, idle, rate, new, failures, probes, lost)

    # Publications and evaluations.

    def _arrived(self, version: int) -> None:
        started, now = self._published.pop(version, time.time()), time.time()
        self.training.span("publish", "publish", started, now, f"version {version}", version)
        self.training.times.published(now - started)

    def _ask_for_evaluation(self, version: int) -> None:
        if self.evaluates:
            groups = self.generation.evaluation()
            self._evaluations[version] = (self.training.update, groups)
            samples = self.training.spec.evaluation.samplesPerPrompt
            self.inbox.put_nowait(requests.EvaluateVersion(version, groups, samples))

    def _skip_evaluation(self, version: int) -> None:
        update, groups = self._evaluations.pop(version)
        logger.info(
            "the evaluation after update %d was skipped: later weights were published, or the run stops", update
        )
        for group in groups:
            self.generation.forget(group)

    async def _evaluate(self, version: int) -> None:
        started = time.time()
        update, groups = self._evaluations.pop(version)
        results = await self.generation.results(groups)
        training = self.training
        training.recorder.append(evaluation_record(results, update=update, version=version, time=training.clock.now()))
        self.sampler.evaluated(results, update=update, version=version)
        training.span("evaluate", "evaluate", started, time.time(), f"update {update}")
        self.has_last_evaluation |= update >= training.updates_total

    async def _last_scores(self, tasks: asyncio.TaskGroup) -> None:
        """Wait until the responses of all evaluations are scored, or until the run has to stop."""
        stopping = tasks.create_task(self.stop.wait())
        while self._scoring and not stopping.done():
            await asyncio.wait({stopping, *self._scoring}, return_when=asyncio.FIRST_COMPLETED)

    async def _stop_when_ordered(self) -> None:
        """Wait until the run has to stop, and then send the request StopTraining to the coordinator.

        If the present weights are not saved yet, the request TakeCheckpoint is sent first.
        """
        await self.stop.wait()
        if self.turns is not None:
            self.turns.stop()
        if not self.training.saved:
            self.inbox.put_nowait(requests.TakeCheckpoint())
        self.inbox.put_nowait(requests.StopTraining())
