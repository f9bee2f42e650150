"""Adds up the numbers of summary.json, record by record."""

import math
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime

from qwen35_trainer.progress.records import (
    TIME_PARTS,
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
)


@dataclass(slots=True)
class TimeMean:
    """The mean of a value over the updates, weighted with the duration of each update."""

    total: float = 0.0
    seconds: float = 0.0

    def add(self, value: float | None, seconds: float) -> None:
        if value is not None:
            self.total += value * seconds
            self.seconds += seconds

    @property
    def value(self) -> float | None:
        """The weighted mean of the values. None if no value was added."""
        return self.total / self.seconds if self.seconds else None


@dataclass(slots=True)
class FailureCounts:
    """Numbers of errors and time-outs of each reward, and a description of the first failed call."""

    errors: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)
    first: str | None = None
    first_time: float = math.inf

    def add(self, record: UpdateRecord | EvaluationRecord) -> None:
        self.errors.update(record.errors_by_reward)
        self.timeouts.update(record.timeouts_by_reward)
        if record.first_reward_error and record.time < self.first_time:
            self.first, self.first_time = record.first_reward_error, record.time


@dataclass(slots=True)
class RunTotals:
    """The totals of a run so far: sums, counts, and the newest record of each kind, but no history.

    Updates and evaluations that a later attempt repeated (`repeats.py`) are not counted.
    """

    started: str | None = None
    seconds: float = 0.0
    version: int = 0
    """The newest version in the records of the present attempt. It is a maximum, because an evaluation or checkpoint
    may have an older version than a record before it."""
    updates: int = 0
    first_update_time: float | None = None
    update: UpdateRecord | None = None
    """The last update."""
    update_seconds: float = 0.0
    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    masked_tokens: int = 0
    reward_errors: int = 0
    groups_without_signal: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    """Lag in versions → number of trained tokens."""
    groups_left: Counter[str] = field(default_factory=Counter)
    time_parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PARTS, 0.0))
    """Name of a part in `TIME_PARTS` → its seconds in all updates."""
    rollout_idle: TimeMean = field(default_factory=TimeMean)
    train_idle: TimeMean = field(default_factory=TimeMean)
    tokens_per_second: TimeMean = field(default_factory=TimeMean)
    failures: FailureCounts = field(default_factory=FailureCounts)
    evaluation_before: EvaluationRecord | None = None
    """The evaluation before training, of the initial model."""
    evaluation_after: EvaluationRecord | None = None
    """The last evaluation after at least one update."""
    evaluation: EvaluationRecord | None = None
    """The last evaluation."""
    checkpoint: CheckpointRecord | None = None
    export: ExportRecord | None = None
    """The last export, whether it succeeded or not."""
    exported: str | None = None
    """The newest folder that an export wrote."""
    finish: FinishRecord | None = None
    """How the run ended. None if the last attempt has not ended."""

    def add(self, record: RunRecord, *, repeated: bool = False) -> None:
        """Add the next record.

        repeated: whether a later attempt repeated the update or evaluation. Repeated records do not count.
        """
        self.seconds = max(self.seconds, record.end if isinstance(record, SpanRecord) else record.time)
        if isinstance(record, UpdateRecord):
            self.version = record.version  # lower where an attempt resumes
        elif not isinstance(record, SpanRecord | FinishRecord):
            self.version = max(self.version, record.version)
        match record:
            case UpdateRecord():
                self.finish = None
                self._note_start(record)
                if not repeated:
                    self._add_update(record)
            case EvaluationRecord():
                if not repeated:
                    self._add_evaluation(record)
            case CheckpointRecord():
                self.checkpoint = record
            case ExportRecord():
                self.export = record
                self.exported = self.exported if record.problem else record.path
            case FinishRecord():
                self.finish = record
                self._note_start(record)

    def _note_start(self, record: UpdateRecord | FinishRecord) -> None:
        """Compute the time at which the training started, from the first record that has a `wall_time`."""
        if self.started is None and record.wall_time is not None:
            started = datetime.fromtimestamp(record.wall_time - record.time, UTC)
            self.started = started.isoformat(timespec="seconds").replace("+00:00", "Z")

    def _add_update(self, update: UpdateRecord) -> None:
        self.update = update
        self.first_update_time = update.time if self.first_update_time is None else self.first_update_time
        self.updates += 1
        self.update_seconds += update.seconds
        self.prompts += update.prompts
        self.samples += update.samples
        self.tokens += update.tokens
        self.masked_tokens += update.masked_tokens
        self.reward_errors += update.reward_errors
        self.groups_without_signal += update.groups_without_signal
        self.lags.update({lag: count for lag, count in update.lag_histogram.items() if count})
        self.groups_left.update(update.groups_left)
        for part in TIME_PARTS:
            self.time_parts[part] += getattr(update, f"seconds_{part}")
        self.rollout_idle.add(update.rollout_idle, update.seconds)
        self.train_idle.add(update.train_idle, update.seconds)
        self.tokens_per_second.add(update.tokens_per_second, update.seconds)
        self.failures.add(update)

    def _add_evaluation(self, evaluation: EvaluationRecord) -> None:
        self.evaluation = evaluation
        if evaluation.update == 0:
            self.evaluation_before = evaluation
        else:
            self.evaluation_after = evaluation
        self.reward_errors += sum(evaluation.errors_by_reward.values()) + sum(evaluation.timeouts_by_reward.values())
        self.failures.add(evaluation)
