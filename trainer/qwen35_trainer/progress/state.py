"""The present state of a run, built from its records."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    FinishRecord,
    RunRecord,
    UpdateRecord,
)

_RECENT_UPDATES: Final = 20


@dataclass(slots=True)
class RunState:
    """The latest record of each kind, and the values of earlier records that the views need."""

    name: str
    folder: Path
    updates_total: int | None
    max_version_lag: int | None
    phase: str = "starting"
    update: UpdateRecord | None = None
    rewards: list[float] = field(default_factory=list)
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
                    self.rewards.append(record.reward_mean)
            case EvaluationRecord():
                self.before = self.before or record
                self.evaluation = record
            case CheckpointRecord():
                self.checkpoint = record
            case FinishRecord():
                self.finish = record

    def seconds_left(self) -> float | None:
        """Return the estimated time to the end, from the mean duration of the latest updates.

        None before the first update.
        """
        if not self.update or not self.updates_total:
            return None
        return (self.updates_total - self.update.update) * sum(self.seconds) / len(self.seconds)
