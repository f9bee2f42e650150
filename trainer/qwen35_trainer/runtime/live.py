"""The fields of the spec that may change while an attempt runs."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.contract import Live
from qwen35_trainer.spec import TrainingSpec


@dataclass
class LiveFields:
    """Read by the loop at every update, changed by the driver alone. The spec itself stays as it was."""

    now: Live

    @classmethod
    def of(cls, spec: TrainingSpec) -> LiveFields:
        return cls(
            Live(
                checkpointEveryUpdates=spec.checkpoint.everyUpdates,
                checkpointKeep=spec.checkpoint.keep,
                evaluationEveryUpdates=spec.evaluation.everyUpdates,
                checkpointExport=spec.checkpoint.export,
            )
        )
