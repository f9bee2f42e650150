"""Supervised fine-tuning: batches straight from the data, in epoch order, and nothing published.

batch b = examples b·size … ─► train pool ─► evaluation, checkpoint copied, when due ─► batch b + 1
                                                          └─► written beside the next batches; the next one waits for it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_trainer.data.prompts import PromptOrder
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.pipeline.snapshot import Snapshot
from qwen35_trainer.progress.records import Outcome
from qwen35_trainer.runtime.assembly import TokenAge, assemble_supervised
from qwen35_trainer.runtime.measures import supervised_evaluation_record
from qwen35_trainer.runtime.stopping import done_before
from qwen35_trainer.runtime.training import Next, Training


@dataclass(frozen=True)
class Supervised:
    """Examples to train on. Batch b is positions b·size … of the epoch order: resuming needs its number alone."""

    examples: Sequence[SupervisedExample]
    held_out: Sequence[SupervisedExample]
    order: PromptOrder
    size: int
    """Examples in a batch."""
    updates: int
    """Optimizer steps in a batch."""

    def batch(self, number: int) -> TrainBatch:
        positions = range(number * self.size, (number + 1) * self.size)
        return assemble_supervised([self.examples[self.order.prompt_index(at)] for at in positions], self.updates)

    def validation(self) -> TrainBatch:
        return assemble_supervised(self.held_out, updates=1)


@dataclass
class SupervisedLoop:
    """Runs to the end, or until `stop` is set."""

    supervised: Supervised
    training: Training
    stop: asyncio.Event
    must_save: bool
    """Save also when nothing was trained."""
    _saving: asyncio.Task[None] | None = None

    @property
    def _batch(self) -> int:
        return self.training.update // self.supervised.updates

    async def run(self) -> Outcome:
        """Train. Raises what made it impossible to go on."""
        async with asyncio.TaskGroup() as tasks:  # left when the last checkpoint is complete
            return await self._train(tasks)

    async def _train(self, tasks: asyncio.TaskGroup) -> Outcome:
        training = self.training
        if training.update == 0 and training.spec.evaluation.atStart:
            evaluated = await done_before(self.stop, asyncio.ensure_future(self._evaluate()))
            if not evaluated and not self.must_save:  # nothing is trained, so nothing is lost
                return "Stopped"
        while training.update < training.updates_total:
            if self.stop.is_set():
                if not training.saved:
                    await self._save(tasks)
                return "Stopped"
            started = time.time()
            # Reading images takes long enough to keep the run's other coroutines waiting.
            batch = await asyncio.to_thread(self.supervised.batch, self._batch)
            waited = time.time() - started
            await training.train(Next(batch, version=0, age=TokenAge({}, 0), waited=waited))
            if training.evaluation_due(self.supervised.updates):
                await self._evaluate()
            if training.checkpoint_due():
                await self._save(tasks)
        return "Succeeded"

    async def _save(self, tasks: asyncio.TaskGroup) -> None:
        if self._saving is not None:
            await self._saving
        copied = asyncio.Event()
        self._saving = tasks.create_task(self.training.save(Snapshot(batch=self._batch), version=0, copied=copied))
        await copied.wait()

    async def _evaluate(self) -> None:
        """Held-out loss of the weights as they are."""
        training, started = self.training, time.time()
        if self.supervised.held_out:
            batch = await asyncio.to_thread(self.supervised.validation)
            loss = await training.pool.negative_log_likelihood(batch)
            training.recorder.append(
                supervised_evaluation_record(
                    loss, update=training.update, samples=batch.samples, time=training.clock.now()
                )
            )
            training.span("evaluate", "evaluate", started, time.time(), f"update {training.update}")
