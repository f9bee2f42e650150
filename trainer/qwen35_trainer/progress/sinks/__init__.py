"""Where metrics go besides the metrics file."""

from collections.abc import Mapping
from pathlib import Path

from qwen35_trainer.progress.sinks.base import Sink
from qwen35_trainer.spec.tracking import Tracking


def open_sinks(tracking: Tracking, *, folder: Path, name: str, run_id: str, config: Mapping[str, object]) -> list[Sink]:
    """The sinks that `spec.tracking` asks for.

    folder: the run's; each sink keeps its files in a folder of its own below.  run_id: the same for every attempt of a
    run and for no other run: at a service, attempts go on in one run.  config: the resolved manifest, as plain data.

    Raises ModuleNotFoundError naming the field and the extra to install where a sink's package is missing.
    """
    sinks: list[Sink] = []
    # Imported where asked for: a run without them needs none of these packages, and they are slow to import.
    if tracking.tensorboard:
        from qwen35_trainer.progress.sinks.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if asked := tracking.wandb:
        from qwen35_trainer.progress.sinks.wandb import wandb_sink

        sinks.append(
            wandb_sink(
                project=asked.project, entity=asked.entity, name=name, run_id=run_id, folder=folder, config=config
            )
        )
    if server := tracking.mlflow:
        from qwen35_trainer.progress.sinks.mlflow import mlflow_sink

        sinks.append(
            mlflow_sink(
                tracking_uri=server.trackingUri, experiment=server.experiment, name=name, run_id=run_id, config=config
            )
        )
    return sinks
