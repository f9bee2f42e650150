"""Where an attempt stands, folded from its records: pure, so that every report is a function of what happened."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

from qwen35_trainer.contract import AttemptState, CheckpointReport, Progress, Replica
from qwen35_trainer.progress.held_out import accuracy_is_meaningful, reward_is_meaningful
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    Record,
    SpanRecord,
    UpdateRecord,
    surviving_evaluations,
    surviving_updates,
)
from qwen35_trainer.runtime.clock import Clock

REMEMBERED = 20
"""Versions, and updates, whose times tell the pace."""
FEWEST = 3
"""Versions, and updates, that a pace takes."""


@dataclass(frozen=True)
class Ended:
    """How the attempt ended. `reason` is the error's class, empty for success."""

    state: AttemptState
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Standing:
    """Totals are over all attempts; all else is the latest of this one."""

    attempt: int
    clock: Clock = field(default_factory=lambda: Clock(0.0))
    head: str | None = None
    """The driver's pod."""
    phase: str = "starting"
    updates: int | None = None
    update: int = 0
    version: int = 0
    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    latest: UpdateRecord | None = None
    took: tuple[float, ...] = ()
    """Seconds of the latest updates."""
    accuracy: float | None = None
    """Of the latest evaluation; None where it is not meaningful, as for graded rewards (`progress.held_out`)."""
    held_out_reward: float | None = None
    """Of the latest evaluation; None where it equals `accuracy`."""
    published: tuple[float, ...] = ()
    """Unix seconds of the latest versions."""
    checkpoint: CheckpointReport | None = None
    export: CheckpointReport | None = None
    stop: str | None = None
    """The order that is being carried out."""
    ended: Ended | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Replica → its pod."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Replica → seconds of work since the latest update."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Replica → idle share, 0 to 1, of the time between the latest two updates."""

    def resumed(self, clock: Clock, earlier: Iterable[Record], checkpoint: CheckpointReport | None) -> Self:
        """At the beginning of an attempt: `earlier` is what led to the checkpoint."""
        records = list(earlier)
        trained, evaluations = surviving_updates(records), surviving_evaluations(records)
        return replace(
            self,
            clock=clock,
            checkpoint=checkpoint,
            update=0 if checkpoint is None else checkpoint.update,
            version=trained[-1].version if trained else 0,
            accuracy=_accuracy(evaluations[-1]) if evaluations else None,
            held_out_reward=_held_out_reward(evaluations[-1]) if evaluations else None,
            prompts=sum(record.prompts for record in trained),
            samples=sum(record.samples for record in trained),
            tokens=sum(record.tokens for record in trained),
        )

    def after(self, record: Record) -> Self:
        """With one more record."""
        match record:
            case UpdateRecord():
                return self._updated(record)
            case SpanRecord(kind="publish", version=int(version)):
                published = (*self.published, max(0.0, self.clock.wall(record.end)))[-REMEMBERED:]
                return replace(self, version=max(self.version, version), published=published)
            case SpanRecord(kind="generate"):
                seconds = self.busy.get(record.lane, 0.0) + max(0.0, record.end - record.start)
                return replace(self, busy={**self.busy, record.lane: seconds})
            case EvaluationRecord():
                return replace(self, accuracy=_accuracy(record), held_out_reward=_held_out_reward(record))
            case CheckpointRecord():
                return replace(self, checkpoint=saved(Path(record.path), record.update, self.clock.wall(record.time)))
            case ExportRecord(problem=""):
                return replace(self, export=saved(Path(record.path), record.update, self.clock.wall(record.time)))
            case _:
                return self

    def _updated(self, record: UpdateRecord) -> Self:
        first = record.seconds > 0  # of its batch: the others come at the same moment and say nothing about time
        return replace(
            self,
            phase=self.phase if self.stop else "training",
            updates=record.updates_total,
            update=max(self.update, record.update),
            version=max(self.version, record.version),
            prompts=self.prompts + record.prompts,
            samples=self.samples + record.samples,
            tokens=self.tokens + record.tokens,
            latest=record,
            took=(*self.took, max(0.0, record.seconds))[-REMEMBERED:],
            busy={} if first else self.busy,
            idle={name: _share(1 - self.busy.get(name, 0.0) / record.seconds) for name in self.hosts}
            if first
            else self.idle,
        )

    def progress(self, now: float) -> Progress:
        """The report at Unix second `now`."""
        ended, latest = self.ended or Ended("Running"), self.latest
        measured = {} if latest is None else _measured(latest)
        return Progress(
            attempt=self.attempt,
            state=ended.state,
            time=max(0.0, now),
            stopAcknowledged=self.stop,
            reason=ended.reason[:128] or None,
            message=ended.message[:4096],
            head=self.head,
            phase=self.phase[:256],
            update=self.update,
            updates=self.updates,
            version=self.version,
            versionTime=self.published[-1] if self.published else None,
            versionSeconds=_pace(self.published),
            secondsPerUpdate=_finite(fmean(self.took)) if len(self.took) >= FEWEST else None,
            accuracy=None if self.accuracy is None else _share(self.accuracy),
            heldOutReward=self.held_out_reward,
            prompts=self.prompts,
            samples=self.samples,
            tokens=self.tokens,
            checkpoint=self.checkpoint,
            export=self.export,
            replicas=tuple(
                Replica(pods=(host,), idle=self.idle.get(name, 0.0)) for name, host in list(self.hosts.items())[:1024]
            ),
            **measured,
        )


def saved(path: Path, update: int, time: float) -> CheckpointReport:
    """The report of a checkpoint, or an export, that was complete at Unix second `time`."""
    return CheckpointReport(uri=path.as_uri(), update=update, time=max(0.0, time))


def _measured(latest: UpdateRecord) -> dict[str, Any]:
    """What the latest update says about itself; what is not finite is left out, since JSON has no word for it."""
    return {
        "reward": _finite(latest.reward_mean),
        "lagMean": _finite(latest.lag_mean),
        "lagMax": latest.lag_max,
        "rolloutIdle": None if latest.rollout_idle is None else _share(latest.rollout_idle),
        "trainIdle": None if latest.trainer_idle is None else _share(latest.trainer_idle),
        "tokensPerSecond": _finite(latest.tokens_per_second),
    }


def _accuracy(evaluation: EvaluationRecord) -> float | None:
    meaningful = accuracy_is_meaningful([(evaluation.accuracy, evaluation.reward_mean)])
    return _finite(evaluation.accuracy) if meaningful else None


def _held_out_reward(evaluation: EvaluationRecord) -> float | None:
    meaningful = reward_is_meaningful([(evaluation.accuracy, evaluation.reward_mean)])
    return _finite(evaluation.reward_mean) if meaningful else None


def _pace(published: tuple[float, ...]) -> float | None:
    if len(published) < FEWEST:
        return None
    return max(0.0, median(later - earlier for earlier, later in pairwise(published)))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _share(value: float) -> float:
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0
