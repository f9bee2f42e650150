"""Supervised fine-tuning: batches come directly from the data, in epoch order, and no weights are published.

batch b = examples b·size … ─► train pool ─► evaluation, checkpoint copied, when due ─► batch b + 1
                                                          └─► written while the next batches train; the next checkpoint waits for it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.progress.records import RunOutcome
from qwen35_trainer.runtime.assembly import TokenAge, assemble_supervised
from qwen35_trainer.runtime.background import done_before
from qwen35_trainer.runtime.measurements import supervised_evaluation_record
from qwen35_trainer.runtime.train_session import NextBatch, TrainSession


@dataclass(frozen=True)
class Supervised:
    """The examples of an SFT run and their order.

    Batch b consists of the positions b·size to (b+1)·size - 1 of the epoch order, so the number of a batch is
    enough to resume.
    """

    examples: Sequence[SupervisedExample]
    held_out: Sequence[SupervisedExample]
    order: PromptOrder
    size: int
    """Number of examples in a batch."""
    updates: int
    """Number of updates (optimizer steps) in a batch."""

    def batch(self, number: int) -> TrainBatch:
        positions = range(number * self.size, (number + 1) * self.size)
        return assemble_supervised([self.examples[self.order.prompt_index(at)] for at in positions], self.updates)

    def validation(self) -> TrainBatch:
        return assemble_supervised(self.held_out, updates=1)


@dataclass
class SupervisedLoop:
    """The main loop of an SFT run: trains batches until the last update, or until `stop` is set."""

    supervised: Supervised
    training: TrainSession
    stop: asyncio.Event
    must_save: bool
    """Whether the run must save a checkpoint even if nothing trains, because the folder of its checkpoints
    has none yet."""
    _saving: asyncio.Task[None] | None = None

    @property
    def _batch(self) -> int:
        return self.training.update // self.supervised.updates

    async def run(self) -> RunOutcome:
        """Run the loop until the run ends. Returns Succeeded after the last update, and otherwise Stopped.

        Errors are raised in an ExceptionGroup.
        """
        async with asyncio.TaskGroup() as tasks:  # left when the last checkpoint is complete
            return await self._train(tasks)

    async def _train(self, tasks: asyncio.TaskGroup) -> RunOutcome:
        training = self.training
        await training.export_last(version=0)
        if training.update == 0 and training.spec.evaluation.atStart:
            evaluated = await done_before(self.stop, asyncio.ensure_future(self._evaluate()))
            if not evaluated and not self.must_save:  # nothing has trained, so nothing is lost
                return "Stopped"
        while training.update < training.updates_total:
            if self.stop.is_set():
                if not training.saved:
                    await self._save(tasks)
                return "Stopped"
            started = time.time()
            # In a thread, because the tokens of a large batch take a while to pack.
            batch = await asyncio.to_thread(self.supervised.batch, self._batch)
            waited = time.time() - started
            await training.train(NextBatch(batch, version=0, age=TokenAge({}, 0), waited=waited))
            if training.evaluation_due(self.supervised.updates):
                await self._evaluate()
            if training.checkpoint_due():
                await self._save(tasks)
        if not training.saved:  # nothing has trained, and the checkpoint is in another folder
            await self._save(tasks)
        return "Succeeded"

    async def _save(self, tasks: asyncio.TaskGroup) -> None:
        if self._saving is not None:
            await self._saving
        copied = asyncio.Event()
        self._saving = tasks.create_task(
            self.training.save(SchedulingSnapshot(batch=self._batch), version=0, copied=copied)
        )
        await copied.wait()

    async def _evaluate(self) -> None:
        """Record the held-out loss of the present weights. Without held-out examples, do nothing."""
        training, started = self.training, time.time()
        if self.supervised.held_out:
            batch = await asyncio.to_thread(self.supervised.validation)
            loss = await training.pool.negative_log_likelihood(batch)
            training.recorder.append(
                supervised_evaluation_record(
                    loss, update=training.update, samples=batch.samples, time=training.clock.now()
                )
            )
            training.times.evaluated(time.time() - started)
            training.span("evaluate", "evaluate", started, time.time(), f"update {training.update}")
