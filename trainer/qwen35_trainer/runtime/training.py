"""The half of the loop that trains: the train pool, and what is written down about it.

    train ─► train ─► save ──copied──► train ─► train ─► …
                        └─► written ─► complete, a record ─► exported, if asked for         beside the next batches

Both loops use it, one with rollouts and one without. Calls are made one at a time, except that a save lets the next batch
train once the state is copied; the next save comes when it is complete.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qwen35_trainer.engines.base import UpdateMetrics
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.pipeline.snapshot import Snapshot
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import CheckpointRecord, ExportRecord, SpanKind, SpanRecord
from qwen35_trainer.runtime.assembly import ScoredGroup, TokenAge
from qwen35_trainer.runtime.calls import Stalled, WorkerLost
from qwen35_trainer.runtime.checkpoint import CheckpointError, CheckpointStore, Progress
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.live import LiveFields
from qwen35_trainer.runtime.measures import Pipeline, UpdateTimes, update_record
from qwen35_trainer.runtime.meter import PoolMeter
from qwen35_trainer.runtime.schedule import learning_rate
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.spec import TrainingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Next:
    """A batch that is about to be trained, and where it came from."""

    batch: TrainBatch
    version: int
    age: TokenAge
    groups: Sequence[ScoredGroup] = ()
    waited: float = 0.0
    """Seconds that the train pool had nothing to do before it."""


@dataclass
class Training:
    """The train pool between `update` and `updates_total`."""

    spec: TrainingSpec
    pool: TrainPool
    recorder: Recorder
    checkpoints: CheckpointStore | None
    """None: nothing is kept."""
    clock: Clock
    live: LiveFields
    exports: Exports
    attempt: str
    """Its checkpoints and its journal record this, so that neither is combined with those of another attempt."""
    updates_total: int
    update: int = 0
    """Optimizer steps made."""
    times: UpdateTimes = field(default_factory=UpdateTimes)
    _saved_at: int = field(init=False)
    """Updates in the newest checkpoint, complete or under way."""
    _saved: bool = False
    _busy: PoolMeter = field(default_factory=lambda: PoolMeter(workers=1))
    _updated: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._saved_at = self.update

    async def train(self, upcoming: Next, pipeline: Callable[[], Pipeline | None] = lambda: None) -> None:
        """Train a batch, and write a record for each of its updates. `pipeline` is asked when it has trained."""
        rates = [
            learning_rate(self.spec.train.optimizer, self.update + step, self.updates_total)
            for step in range(upcoming.batch.updates)
        ]
        started = time.time()
        metrics: list[UpdateMetrics] = await self.pool.train(upcoming.batch, rates)
        ended = time.time()
        self._busy.add(started, ended)
        self.span("train-0", "train", started, ended)
        self.times.trained(upcoming.waited, ended - started)
        trainer_idle, _ = self._busy.read()
        rollouts = pipeline()
        seconds, self._updated = ended - self._updated, ended
        for step, measured in enumerate(metrics):
            self.update += 1
            self.recorder.append(
                update_record(
                    measured,
                    step=step,
                    update=self.update,
                    updates_total=self.updates_total,
                    version=upcoming.version,
                    time=self.clock.at(ended),
                    wall_time=ended,
                    seconds=seconds,
                    batch=upcoming.batch,
                    age=upcoming.age,
                    groups=upcoming.groups,
                    times=self.times,
                    pipeline=rollouts,
                    trainer_idle=trainer_idle,
                )
            )
        self.times = UpdateTimes()

    def evaluation_due(self, step: int) -> bool:
        """Whether the last `step` updates passed one after which the held-out prompts are evaluated."""
        every = self.live.now.evaluationEveryUpdates
        return self.update >= self.updates_total or bool(every and self.update % every < step and self.update >= every)

    @property
    def saved(self) -> bool:
        """Whether a checkpoint of this run has all that is trained that is to be kept, or is to have it: one that fails
        ends the run.
        """
        return self.checkpoints is None or (self._saved and self._saved_at == self.update)

    def checkpoint_due(self) -> bool:
        every = self.live.now.checkpointEveryUpdates
        return self.update >= self.updates_total or self.update // every > self._saved_at // every

    async def save(self, snapshot: Snapshot, version: int, copied: asyncio.Event) -> None:
        """Checkpoint the weights, and where the run stands; nothing where nothing is kept. Raises CheckpointError,
        WorkerLost and Stalled.

        Returns when the checkpoint is complete and, if asked for, exported. `copied` is set as soon as training may go on.
        """
        if self.checkpoints is None:
            copied.set()
            return
        started = time.time()
        self._saved_at, self._saved = self.update, True
        progress = Progress(
            update=self.update,
            batch=snapshot.batch,
            position=snapshot.position,
            pending=snapshot.pending,
            elapsed=self.clock.now(),
            group=snapshot.group,
            journal=self.attempt,
        )
        self.checkpoints.keep = self.live.now.checkpointKeep
        try:
            path = await self.checkpoints.save(progress, lambda folder: self.pool.save(folder, copied))
        except CheckpointError as error:
            # The batch beside it meets the same, and the run must end by one name: nothing is wrong with the storage.
            if isinstance(reason := error.__cause__, (WorkerLost, Stalled)):
                raise reason from reason.__cause__
            raise
        self.span("checkpoint", "checkpoint", started, time.time())
        self.recorder.append(
            CheckpointRecord(
                update=progress.update,
                version=version,
                time=self.clock.now(),
                path=str(path),
                seconds=time.time() - started,
            )
        )
        await self._export(path, progress.update, version)

    async def _export(self, checkpoint: Path, update: int, version: int) -> None:
        """Beside the next batches, and before the next save: it may delete the checkpoint."""
        wanted = self.live.now.checkpointExport
        if wanted == "None" or (wanted == "AtEnd" and update < self.updates_total):
            return
        started = time.time()
        folder, problem = await self.exports.export(checkpoint, self.live.now.checkpointKeep)
        if problem:
            logger.error("checkpoint %s was not exported: %s", checkpoint, problem)
        self.recorder.append(
            ExportRecord(
                update=update,
                version=version,
                time=self.clock.now(),
                path=str(folder),
                seconds=time.time() - started,
                problem=problem,
            )
        )

    def span(
        self, lane: str, kind: SpanKind, start: float, end: float, label: str = "", version: int | None = None
    ) -> None:
        """One bar of the timeline; times are wall-clock seconds."""
        at = self.clock.at
        self.recorder.append(
            SpanRecord(lane=lane, kind=kind, start=at(start), end=at(end), label=label, version=version)
        )
