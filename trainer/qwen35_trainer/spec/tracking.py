"""spec.tracking: who else sees the metrics."""

from pydantic import Field

from qwen35_trainer.spec.base import Section


class WandB(Section):
    """Weights & Biases."""

    project: str = Field(
        min_length=1, max_length=128, description="Project to log to. No default. verl: trainer.project_name."
    )
    entity: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="Team or user that owns the project. By default the key's own. verl: none (WANDB_ENTITY).",
    )


class MLflow(Section):
    """MLflow."""

    trackingUri: str = Field(
        min_length=1,
        max_length=1024,
        description="Address of the tracking server, or a file: or sqlite: address. No default. "
        "verl: none (MLFLOW_TRACKING_URI).",
    )
    experiment: str = Field(
        min_length=1, max_length=256, description="Experiment to log to. No default. verl: trainer.project_name."
    )


class Tracking(Section):
    """Metric sinks beside the run's own record."""

    tensorboard: bool = Field(
        True,
        description="Write TensorBoard files into the run's folder. On: they cost little and need no service. "
        "verl: trainer.logger.",
    )
    wandb: WandB | None = Field(None, description="Log to Weights & Biases. None by default. verl: trainer.logger.")
    mlflow: MLflow | None = Field(None, description="Log to MLflow. None by default. verl: trainer.logger.")
