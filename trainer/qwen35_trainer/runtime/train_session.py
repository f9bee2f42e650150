"""The part of the loop that trains: calls the train pool, saves checkpoints, and writes records.

    train ─► train ─► save ──copied──► train ─► train ─► …
                        └─► written ─► complete, a record ─► exported, if wanted            while the next batches train

The loop of RL runs (`loop.py`) and the loop of SFT (`supervised.py`) use it. Calls to the train pool are made one at a
time, with one exception: the next batch may train once a save has copied the state. The next save begins when the
previous save is complete.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qwen35_trainer.algorithms.adaptive_kl import adapted
from qwen35_trainer.contract import LiveSettings
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.manifest import OptimizerSpec, TrainingSpec
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import CheckpointRecord, ExportRecord, SpanKind, SpanRecord
from qwen35_trainer.runtime.assembly import ScoredGroup, TokenAge
from qwen35_trainer.runtime.calls import ActorLost, Stalled
from qwen35_trainer.runtime.checkpoint_store import CheckpointError, CheckpointMeta, CheckpointStore
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.measurements import PipelineMeasures, TrainingClock, UpdateTimes, update_record
from qwen35_trainer.runtime.train_pool import TrainPool

logger = logging.getLogger(__name__)


@dataclass
class LiveFields:
    """The fields of the spec that may change during an attempt. The training loop reads them at every update.

    Only the driver changes them.
    """

    now: LiveSettings

    @classmethod
    def of(cls, spec: TrainingSpec) -> LiveFields:
        return cls(
            LiveSettings(
                checkpointEveryUpdates=spec.checkpoint.everyUpdates,
                checkpointKeep=spec.checkpoint.keep,
                evaluationEveryUpdates=spec.evaluation.everyUpdates,
                checkpointExport=spec.checkpoint.export,
            )
        )


@dataclass(frozen=True)
class NextBatch:
    """The next batch to train, and the data from which it was assembled."""

    batch: TrainBatch
    version: int
    age: TokenAge
    groups: Sequence[ScoredGroup] = ()
    waited: float = 0.0
    """Seconds for which the train pool waited for this batch."""


@dataclass
class TrainSession:
    """The training of one attempt, from `update` to `updates_total`.

    Trains batches, records updates, and saves checkpoints.
    """

    spec: TrainingSpec
    pool: TrainPool
    recorder: Recorder
    checkpoints: CheckpointStore | None
    """The checkpoints of the run. None: the run saves no checkpoints."""
    clock: TrainingClock
    live: LiveFields
    exports: Exports
    attempt: str
    """Name of this attempt. Checkpoints and the journal contain the name, so that a checkpoint is never combined with
    the journal of another attempt."""
    updates_total: int
    update: int = 0
    """Number of updates (optimizer steps) so far."""
    kl_coefficient: float | None = None
    """The coefficient of `algorithm.kl.adaptive` for the next batch; None: the coefficients are fixed."""
    begins_saved: bool = False
    """Whether the attempt continues from a checkpoint in the folder in which it saves.

    It then has nothing to save until a batch has trained. Saving the same update again would only put that checkpoint
    at risk.
    """
    times: UpdateTimes = field(default_factory=UpdateTimes)
    _saved_at: int = field(init=False)
    """Number of updates in the newest checkpoint, which is complete or being written.

    Before the first save, the number of updates at the start of the attempt.
    """
    _saved: bool = field(init=False)
    """Whether the folder of the checkpoints has, or is getting, the checkpoint of update `_saved_at`."""
    _updated: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._saved_at, self._saved = self.update, self.begins_saved

    async def train(self, upcoming: NextBatch, pipeline: Callable[[], PipelineMeasures | None] = lambda: None) -> None:
        """Train a batch, and write a record for each update of the batch.

        pipeline: called after the training; returns the measurements of the rollout pool, or None in SFT.
        """
        rates = [
            learning_rate(self.spec.train.optimizer, self.update + step, self.updates_total)
            for step in range(upcoming.batch.updates)
        ]
        batch = replace(upcoming.batch, kl_coefficient=self.kl_coefficient)
        started = time.time()
        metrics: list[UpdateMetrics] = await self.pool.train(batch, rates)
        ended = time.time()
        self.span("train-0", "train", started, ended)
        self.times.trained(upcoming.waited, ended - started)
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
                    batch=batch,
                    age=upcoming.age,
                    groups=upcoming.groups,
                    times=self.times,
                    pipeline=rollouts,
                )
            )
        self.times = UpdateTimes()
        self._adapt_kl(metrics, batch.samples)

    def _adapt_kl(self, metrics: Sequence[UpdateMetrics], samples: int) -> None:
        """Adapt the KL coefficient to the KL divergence of a batch that has trained.

        samples: number of samples of the batch. Updates without a trained token, or with a divergence that is not
        finite, do not count.
        """
        settings = self.spec.algorithm.kl.adaptive
        measured = [(each.means.get("kl", math.nan), each.tokens) for each in metrics if each.tokens]
        measured = [(divergence, tokens) for divergence, tokens in measured if math.isfinite(divergence)]
        if self.kl_coefficient is None or settings is None or not measured:
            return
        divergence = sum(mean * tokens for mean, tokens in measured) / sum(tokens for _, tokens in measured)
        self.kl_coefficient = adapted(
            self.kl_coefficient,
            divergence=divergence,
            target=settings.target,
            samples=samples,
            horizon=settings.horizon,
        )

    def evaluation_due(self, count: int) -> bool:
        """Return whether to evaluate now.

        The result is True if the run has made its last update, or if an evaluation was due at one of the last `count`
        updates.
        """
        every = self.live.now.evaluationEveryUpdates
        return self.update >= self.updates_total or bool(every and self.update % every < count and self.update >= every)

    @property
    def saved(self) -> bool:
        """Whether a checkpoint contains all updates so far. Always true if the run saves no checkpoints.

        A checkpoint that is still being written counts too. If writing it fails, the run ends.
        """
        return self.checkpoints is None or (self._saved and self._saved_at == self.update)

    def checkpoint_due(self) -> bool:
        every = self.live.now.checkpointEveryUpdates
        return self.update >= self.updates_total or self.update // every > self._saved_at // every

    async def save(self, snapshot: SchedulingSnapshot, version: int, copied: asyncio.Event) -> None:
        """Save a checkpoint, unless the run saves none. Sets `copied` as soon as training may continue.

        snapshot: the state of scheduling. version: version of the weights, for the records. Returns when the
        checkpoint is complete and, if the manifest requests it, exported. Raises CheckpointError if the checkpoint
        cannot be written, Superseded if another attempt owns the folder, and ActorLost or Stalled if a train worker is
        lost or does not answer.
        """
        if self.checkpoints is None:
            copied.set()
            return
        started = time.time()
        self._saved_at, self._saved = self.update, True
        progress = CheckpointMeta(
            update=self.update,
            batch=snapshot.batch,
            position=snapshot.position,
            pending=snapshot.pending,
            elapsed=self.clock.now(),
            group=snapshot.group,
            journal=self.attempt,
            kl_coefficient=self.kl_coefficient,
            kl_first=first_kl_coefficient(self.spec),
        )
        self.checkpoints.keep = self.live.now.checkpointKeep
        try:
            path = await self.checkpoints.save(progress, lambda folder: self._write(folder, copied))
        except CheckpointError as error:
            # Nothing is wrong with the storage. A batch that trains at the same time raises the same error, so the reason is the same.
            if isinstance(reason := error.__cause__, (ActorLost, Stalled)):
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

    async def _write(self, folder: Path, copied: asyncio.Event) -> None:
        """Write the train pool's part of a checkpoint into `folder`. Sets `copied` as soon as training may continue."""
        started = time.time()
        await self.pool.save(folder)
        self.times.saved(time.time() - started)
        copied.set()
        await self.pool.saved()

    async def export_last(self, version: int) -> None:
        """Make the export of the last checkpoint if an earlier attempt saved this checkpoint and ended before its export.

        version: version of the weights, for the record. Does nothing if the attempt begins before the last update, and
        raises the same errors as `save` about the folder.
        """
        if self.checkpoints is None or not self.begins_saved or self.update < self.updates_total:
            return
        checkpoint = self.checkpoints.path_of(self.update)
        if self.live.now.checkpointExport != "None" and await self.exports.is_missing(checkpoint):
            await self._export(checkpoint, self.update, version)

    async def _export(self, checkpoint: Path, update: int, version: int) -> None:
        """Export a checkpoint if spec.checkpoint.export requests it. The next batches train meanwhile.

        The next save waits for the export, because a save may delete the checkpoint that is being exported.
        """
        wanted = self.live.now.checkpointExport
        if wanted == "None" or (wanted == "AtEnd" and update < self.updates_total):
            return
        started = time.time()
        assert self.checkpoints is not None, "this checkpoint is one of them"
        folder, problem = await self.exports.export(checkpoint, self.live.now.checkpointKeep, self.checkpoints.writer)
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
        """Record a span: a time in which a pool or replica did one thing. The report shows it as a bar of the timeline.

        lane: row of the bar. kind: what happened. start, end: in Unix seconds. label: text of the bar. version: version
        of the weights that the span is about; None: it is not about one version.
        """
        at = self.clock.at
        self.recorder.append(
            SpanRecord(lane=lane, kind=kind, start=at(start), end=at(end), label=label, version=version)
        )


def learning_rate(optimizer: OptimizerSpec, update: int, total: int) -> float:
    """Return the learning rate of update number `update`, from 0, of `total` updates.

    The rate grows linearly during the warm-up of w updates: update u has (u + 1) / w of the peak, so no update has rate
    0. Then it stays at its peak (schedule Constant), or falls to its minimum (Linear, Cosine). The minimum would be
    reached at the update after the last one.
    """
    peak, warmup = optimizer.learningRate, optimizer.warmupUpdates
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = (update - warmup) / max(1, total - warmup)
    match optimizer.schedule:
        case "Constant":
            remaining = 1.0
        case "Linear":
            remaining = 1.0 - progress
        case "Cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (optimizer.minLearningRateRatio + (1.0 - optimizer.minLearningRateRatio) * remaining)


def first_kl_coefficient(spec: TrainingSpec) -> float | None:
    """Return the initial coefficient of `algorithm.kl.adaptive`; None in SFT or if the coefficient is fixed."""
    return None if spec.mode == "SFT" else spec.algorithm.kl.first_adapted
