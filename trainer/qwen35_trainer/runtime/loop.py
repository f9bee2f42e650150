"""The training loop: events to the coordinator, its actions to the pools.

    replicas ─┐                                           ┌─► journal            before anything else, when a batch leaves
    scores   ─┼─► inbox ─► coordinator.handle ─► actions ─┼─► generation         Start, Move, Cancel
    trainer  ─┤                                           ├─► orders ─► trainer  Train, Copy, Checkpoint: one at a time
    signals  ─┘                                           ├─► publication        Publish: beside the next batch
                                                          └─► checkpoint         its writing: beside the next batches

waits on              unblocked by                                   deadline
an event              replicas, scores, the trainer, a signal        async.stallSeconds without a scored group, trainer idle
an order: the pool    its ranks' answers                             async.stallSeconds
a checkpoint: disks   every rank's share, written                    async.stallSeconds
publish: a replica    its answer, or its end: then it is replaced    weights.timeoutSeconds

What is dispatched, what a batch takes and when weights travel is the coordinator's to say (`pipeline/`). FullyAsync and
Colocated are this loop; SFT has no rollouts, and a loop of its own (`supervised.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.actions import Action, Reason
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.journal import JOURNALLED
from qwen35_trainer.pipeline.snapshot import Snapshot
from qwen35_trainer.progress.records import Outcome
from qwen35_trainer.rewards.failures import Failures
from qwen35_trainer.runtime.assembly import assemble
from qwen35_trainer.runtime.calls import Stalled
from qwen35_trainer.runtime.generation import Generation
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.measures import Pipeline, evaluation_record
from qwen35_trainer.runtime.rollout_pool import Replica
from qwen35_trainer.runtime.sampler import Sampler
from qwen35_trainer.runtime.training import Next, Training
from qwen35_trainer.weights.publication import Publication

type Order = do.Train | do.Copy | do.Checkpoint


class _Over(Exception):
    """Ends the tasks of a run that has ended."""


def _end() -> None:
    raise _Over


@dataclass
class TrainingLoop:
    """Runs until the coordinator says that it is over. `inbox` is where everyone tells what has happened."""

    coordinator: Coordinator
    generation: Generation
    training: Training
    journal: JournalFile
    inbox: asyncio.Queue[on.Event]
    stop: asyncio.Event
    sampler: Sampler
    evaluates: bool
    """There are held-out prompts."""
    _orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    _copies: dict[int, asyncio.Future[Publication]] = field(default_factory=dict)
    _published: dict[int, float] = field(default_factory=dict)  # version → when it began to travel
    _evaluations: dict[int, tuple[int, Sequence[int]]] = field(default_factory=dict)  # version → update, groups
    _scoring: set[asyncio.Task[None]] = field(default_factory=set)
    _reported: Counter[str] = field(default_factory=Counter)
    _idle_since: float = field(default_factory=time.monotonic)
    _busy: int = 0
    """Orders that are not carried out yet."""
    _ended: bool = False

    async def run(self, weights: Publication, replicas: Iterable[Replica]) -> Outcome:
        """Train, from these weights on. Raises what made it impossible to go on."""
        training = self.training
        await self.journal.begin(self.coordinator.snapshot, training.attempt)
        try:
            async with asyncio.TaskGroup() as tasks:
                self.generation.run(tasks)
                tasks.create_task(self._train_pool(tasks))
                tasks.create_task(self._obey())
                if training.update == 0 and training.spec.evaluation.atStart and not self.stop.is_set():
                    self._ask_for_evaluation(self.coordinator.version)
                self.generation.pool.run(tasks, weights, replicas)
                del weights  # a version takes memory as long as anything refers to it
                await self._drive(tasks)
                await self._last_scores(tasks)
                _end()
        except* _Over:
            pass
        finally:
            await self.journal.close()
            await asyncio.to_thread(self.sampler.close)
        return "Stopped" if training.update < training.updates_total else "Succeeded"

    async def _drive(self, tasks: asyncio.TaskGroup) -> None:
        while not self._ended:
            actions: list[Action] = []
            for event in await self._events():
                actions += self.coordinator.handle(event)
            for action in actions:
                if isinstance(action, JOURNALLED):
                    self.journal.add(action)
            if any(isinstance(action, do.Train) for action in actions):
                await self.journal.flush()
            for action in actions:
                self._carry_out(action, tasks)

    async def _events(self) -> list[on.Event]:
        """What has happened, at least one thing. Raises Stalled."""
        limit = self.training.spec.async_.stallSeconds
        patience = limit if self._busy else self._idle_since + limit - time.monotonic()
        try:
            events = [await asyncio.wait_for(self.inbox.get(), max(0.0, patience))]
        except TimeoutError:
            if self._busy:
                return []  # the order has a deadline of its own
            missing = self.coordinator.buffer.missing()
            due = f"; groups {', '.join(map(str, missing.due[:5]))} are due and run still" if missing.due else ""
            raise Stalled(
                f"no group finished within spec.async.stallSeconds {limit:g}: {missing.finished} of "
                f"{missing.needed} are ready{due}. Raise it, or lower data.maxResponseTokens"
            ) from None
        while not self.inbox.empty():
            events.append(self.inbox.get_nowait())
        if any(isinstance(event, (on.Finished, on.Scored, on.Failed)) for event in events):
            self._idle_since = time.monotonic()
        return events

    def _carry_out(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        generation = self.generation
        match action:
            case do.Dispatched():
                generation.dispatched(action)
            case do.Start():
                generation.start(action)
            case do.Move():
                generation.move(action)
            case do.Cancel():
                generation.cancel(action)
            case do.Left(group):
                generation.forget(group)
            case do.Train() | do.Copy() | do.Checkpoint():
                if isinstance(action, do.Copy):
                    self._copies[action.version] = asyncio.get_running_loop().create_future()
                self._busy += 1
                self._orders.put_nowait(action)
            case do.Publish(version):
                tasks.create_task(self._publish(version))
            case do.Published(version):
                self._arrived(version)
            case do.Evaluated(version):
                task = tasks.create_task(self._evaluate(version))
                self._scoring.add(task)
                task.add_done_callback(self._scoring.discard)
            case do.Ended():
                self._ended = True

    # The train pool.

    async def _train_pool(self, tasks: asyncio.TaskGroup) -> None:
        """Carry out orders, one at a time, until cancelled."""
        while True:
            idle_since = time.time()
            match order := await self._orders.get():
                case do.Train():
                    await self._train(order, time.time() - idle_since)
                case do.Copy(version):
                    self._copies[version].set_result(await self.training.pool.publication(version))
                case do.Checkpoint(snapshot):
                    copied = asyncio.Event()
                    tasks.create_task(self._save(snapshot, copied))
                    await copied.wait()  # the next order may change the weights
                    continue
            self._carried_out()

    def _carried_out(self) -> None:
        self._busy -= 1
        self._idle_since = time.monotonic()

    async def _save(self, snapshot: Snapshot, copied: asyncio.Event) -> None:
        await self.training.save(snapshot, self.coordinator.settings.window.version_of(snapshot.batch), copied)
        await self.journal.compact(snapshot.batch)
        self.inbox.put_nowait(on.Checkpointed(snapshot.batch))
        self._carried_out()

    async def _train(self, order: do.Train, waited: float) -> None:
        settings, training = self.coordinator.settings, self.training
        groups = self.generation.take(order.groups)
        batch, age = assemble(
            groups,
            version=order.version,
            max_lag=settings.window.max_version_lag,
            mask_old=settings.on_missed_deadline == "MaskTokens",
            updates=training.spec.async_.requireBatches,
        )
        await training.train(Next(batch, order.version, age, groups, waited), self._pipeline)
        self.sampler.trained(groups, update=training.update, version=order.version)
        every = settings.window.batches_per_version
        version, rest = divmod(order.batch + 1, every)
        complete = rest == 0 or training.update >= training.updates_total
        if complete and training.evaluation_due(training.spec.async_.requireBatches * every):
            self._ask_for_evaluation(version + (rest > 0))
        if training.checkpoint_due():
            self.inbox.put_nowait(on.CheckpointAsked())
        self.inbox.put_nowait(on.Trained(order.batch))

    def _pipeline(self) -> Pipeline:
        generation, buffer = self.generation, self.coordinator.buffer
        generation.meter.workers = max(1, len(generation.pool))
        idle, rate = generation.meter.read()
        untrained = (reason for reason in Reason if reason is not Reason.TRAINED)
        left = Counter({str(reason): self.coordinator.left[reason] for reason in untrained})
        new, self._reported = left - self._reported, left
        failures, generation.failures = generation.failures, Failures()
        return Pipeline(buffer.counted, buffer.window.limit, idle, rate, new, failures)

    # Weights, and what is measured with them.

    async def _publish(self, version: int) -> None:
        weights = await self._copies.pop(version)
        self._published[version] = time.time()
        self.generation.pool.publish(weights)

    def _arrived(self, version: int) -> None:
        started, now = self._published.pop(version, time.time()), time.time()
        self.training.span("publish", "publish", started, now, f"version {version}", version)
        self.training.times.published(now - started)

    def _ask_for_evaluation(self, version: int) -> None:
        if self.evaluates:
            groups = self.generation.evaluation()
            self._evaluations[version] = (self.training.update, groups)
            samples = self.training.spec.evaluation.samplesPerPrompt
            self.inbox.put_nowait(on.EvaluationAsked(version, groups, samples))

    async def _evaluate(self, version: int) -> None:
        started = time.time()
        update, groups = self._evaluations.pop(version)
        results = await self.generation.results(groups)
        training = self.training
        training.recorder.append(evaluation_record(results, update=update, version=version, time=training.clock.now()))
        self.sampler.evaluated(results, update=update, version=version)
        training.span("evaluate", "evaluate", started, time.time(), f"update {update}")

    async def _last_scores(self, tasks: asyncio.TaskGroup) -> None:
        """Wait for evaluations that are being scored, unless told to stop."""
        told = tasks.create_task(self.stop.wait())
        while self._scoring and not told.done():
            await asyncio.wait({told, *self._scoring}, return_when=asyncio.FIRST_COMPLETED)

    async def _obey(self) -> None:
        """Pass on the order to stop. What is trained is saved, unless it is already."""
        await self.stop.wait()
        if not self.training.saved:
            self.inbox.put_nowait(on.CheckpointAsked())
        self.inbox.put_nowait(on.StopAsked())
