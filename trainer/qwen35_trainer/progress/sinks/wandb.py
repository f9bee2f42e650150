"""A metrics sink that logs to a run of Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qwen35_trainer.progress.records import EvaluationRecord, FinishRecord, RunRecord, UpdateRecord
from qwen35_trainer.progress.sinks.scalars import scalars
from qwen35_trainer.progress.sinks.service import ServiceSink

try:
    import wandb
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "spec.tracking.wandb: the package wandb is not installed. "
        "Run `pip install 'qwen35[wandb]'`, or leave spec.tracking.wandb out.",
        name="wandb",
    ) from error


def wandb_sink(
    *, project: str, entity: str | None, name: str, run_id: str, folder: Path, config: Mapping[str, object]
) -> ServiceSink:
    """Return a sink that logs to the run `run_id` of a Weights & Biases project, and continues that run if it exists.

    With WANDB_MODE=offline the data stay in `folder`. config: the resolved manifest, which W&B uses to compare runs.
    """

    def open_run() -> "_WandbRun":
        return _WandbRun(project=project, entity=entity, name=name, run_id=run_id, folder=folder, config=config)

    return ServiceSink("Weights & Biases", open_run, (wandb.Error, OSError))


class _WandbRun:
    def __init__(
        self, *, project: str, entity: str | None, name: str, run_id: str, folder: Path, config: Mapping[str, object]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # W&B's own step must not decrease, but the update does when an attempt resumes.
        self._run.define_metric("*", step_metric="progress/update")
        self._failed = False

    def write(self, record: RunRecord) -> None:
        if isinstance(record, FinishRecord):
            self._run.summary["outcome"] = record.outcome
            self._failed = record.outcome == "Failed"
        if not (values := scalars(record)):
            return
        logged: dict[str, object] = dict(values)
        if isinstance(record, UpdateRecord | EvaluationRecord):
            logged["progress/update"] = record.update
        if isinstance(record, UpdateRecord) and record.lag_histogram:
            logged["staleness/lag"] = _histogram(record.lag_histogram)
        self._run.log(logged)

    def close(self) -> None:
        self._run.finish(exit_code=int(self._failed))


def _histogram(counts: Mapping[int, int]) -> wandb.Histogram:
    """Return a histogram with one bucket per lag. A bucket begins at its lag and ends at the next lag."""
    edges = np.arange(min(counts), max(counts) + 2)
    return wandb.Histogram(np_histogram=(np.array([counts.get(int(lag), 0) for lag in edges[:-1]]), edges))
