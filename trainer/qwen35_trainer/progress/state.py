"""The present state of a run for the panel or the lines that display it, built from the run's records."""

from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from statistics import fmean
from typing import Final

from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    FinishRecord,
    RunRecord,
    UpdateRecord,
)

_RECENT_UPDATES: Final = 20
_HISTORY_POINTS: Final = 256


class MeanHistory:
    """A sequence of values of any length, reduced to at most 2 · _HISTORY_POINTS means of adjacent values."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._per_mean = 1
        self._sum, self._count = 0.0, 0  # of the values that are in no mean yet

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1
        if self._count == self._per_mean:
            self._means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._means) == 2 * _HISTORY_POINTS:
            self._means = [fmean(pair) for pair in batched(self._means, 2)]
            self._per_mean *= 2

    @property
    def means(self) -> list[float]:
        """The means in order. The last mean may cover fewer values than the other means."""
        return [*self._means, self._sum / self._count] if self._count else list(self._means)


@dataclass(slots=True)
class RunState:
    """The latest record of each kind, and the values of earlier records that the display needs."""

    name: str
    folder: Path
    updates_total: int | None
    max_version_lag: int | None
    phase: str = "starting"
    update: UpdateRecord | None = None
    rewards: MeanHistory = field(default_factory=MeanHistory)
    """History of the mean reward of the updates."""
    seconds: list[float] = field(default_factory=list)
    before: EvaluationRecord | None = None
    evaluation: EvaluationRecord | None = None
    checkpoint: CheckpointRecord | None = None
    finish: FinishRecord | None = None
    first_reward_error: str = ""
    """The first reward error that this process received."""

    def add(self, record: RunRecord) -> None:
        """Update the state with the next record."""
        if isinstance(record, UpdateRecord | EvaluationRecord):
            self.first_reward_error = self.first_reward_error or record.first_reward_error
        match record:
            case UpdateRecord():
                self.update, self.updates_total, self.phase = record, record.updates_total, "training"
                self.seconds = [*self.seconds[1 - _RECENT_UPDATES :], record.seconds]
                if record.reward_mean is not None:
                    self.rewards.add(record.reward_mean)
            case EvaluationRecord():
                self.before = self.before or record
                self.evaluation = record
            case CheckpointRecord():
                self.checkpoint = record
            case FinishRecord():
                self.finish = record

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the end of the run, from the mean duration of the latest updates.

        Returns None before the first update.
        """
        if not self.update or not self.updates_total:
            return None
        return (self.updates_total - self.update.update) * sum(self.seconds) / len(self.seconds)
