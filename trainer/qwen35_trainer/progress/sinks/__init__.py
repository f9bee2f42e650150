"""Opens the sinks of metrics in addition to the metrics file: TensorBoard, Weights & Biases, MLflow."""

from collections.abc import Mapping
from pathlib import Path

from qwen35_trainer.manifest.tracking import TrackingSpec
from qwen35_trainer.progress.sinks.sink import Sink


def open_sinks(
    tracking: TrackingSpec, *, folder: Path, name: str, run_id: str, config: Mapping[str, object]
) -> list[Sink]:
    """Open the sinks that `spec.tracking` sets.

    folder: the folder of the run, which contains the files of the sinks. name: name of the run at a service. run_id:
    identifies the run at a service. All attempts of a run have the same `run_id`, so the service shows them as one run.
    config: the resolved manifest, as plain data.

    Raises ModuleNotFoundError, with the field and the extra to install, if the package of a sink is missing.
    """
    sinks: list[Sink] = []
    # Imported only when used: other runs do not need these packages, and they are slow to import.
    if tracking.tensorboard:
        from qwen35_trainer.progress.sinks.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if wandb := tracking.wandb:
        from qwen35_trainer.progress.sinks.wandb import wandb_sink

        sinks.append(
            wandb_sink(
                project=wandb.project, entity=wandb.entity, name=name, run_id=run_id, folder=folder, config=config
            )
        )
    if mlflow := tracking.mlflow:
        from qwen35_trainer.progress.sinks.mlflow import mlflow_sink

        sinks.append(
            mlflow_sink(
                tracking_uri=mlflow.trackingUri, experiment=mlflow.experiment, name=name, run_id=run_id, config=config
            )
        )
    return sinks
