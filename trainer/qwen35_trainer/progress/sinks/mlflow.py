"""A metrics sink that logs to a run of an MLflow server."""

import time
from collections.abc import Mapping
from typing import Final

from qwen35_trainer.progress.records import CheckpointRecord, EvaluationRecord, FinishRecord, RunRecord, UpdateRecord
from qwen35_trainer.progress.sinks.scalars import scalars
from qwen35_trainer.progress.sinks.service import ServiceSink

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "spec.tracking.mlflow: the package mlflow is not installed. "
        "Run `pip install 'qwen35[mlflow]'`, or leave spec.tracking.mlflow out.",
        name="mlflow",
    ) from error

_RUN_TAG: Final = "qwen35.run"
_STATUS: Final = {"Succeeded": "FINISHED", "Stopped": "KILLED", "Failed": "FAILED"}


def mlflow_sink(
    *, tracking_uri: str, experiment: str, name: str, run_id: str, config: Mapping[str, object]
) -> ServiceSink:
    """Return a sink that logs to one run of an MLflow experiment.

    If the experiment has a run whose tag "qwen35.run" is `run_id`, the sink continues that run; otherwise it creates
    one. config: the resolved manifest, logged as parameters such as "train.nodes".
    """

    def open_run() -> "_MlflowRun":
        return _MlflowRun(MlflowClient(tracking_uri), experiment, name, run_id, config)

    return ServiceSink("MLflow", open_run, (MlflowException, OSError))


class _MlflowRun:
    def __init__(
        self, client: MlflowClient, experiment: str, name: str, run_id: str, config: Mapping[str, object]
    ) -> None:
        self._client = client
        self._status = "KILLED"
        existing = client.get_experiment_by_name(experiment)
        experiment_id = existing.experiment_id if existing else client.create_experiment(experiment)
        runs = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run_id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(experiment_id, run_name=name, tags={_RUN_TAG: run_id}).info.run_id
            client.log_batch(self._id, params=[Param(key, str(value)) for key, value in _flat(config).items()])

    def write(self, record: RunRecord) -> None:
        match record:
            case UpdateRecord() | EvaluationRecord() | CheckpointRecord():
                now = int(time.time() * 1000)
                metrics = [Metric(name, value, now, record.update) for name, value in scalars(record).items()]
                self._client.log_batch(self._id, metrics)
            case FinishRecord():
                self._status = _STATUS[record.outcome]

    def close(self) -> None:
        self._client.set_terminated(self._id, self._status)


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested mappings: {"train": {"nodes": 2}} → {"train.nodes": 2}. Lists stay whole."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
