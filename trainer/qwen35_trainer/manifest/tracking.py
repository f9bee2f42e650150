"""spec.tracking: services that metrics are logged to."""

from pydantic import Field

from qwen35_trainer.manifest.base import Section


class WandBSpec(Section):
    """Logging to Weights & Biases."""

    project: str = Field(
        min_length=1, max_length=128, description="Project to log to. No default. verl: trainer.project_name."
    )
    entity: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="Team or user that owns the project. Default: that of the API key. verl: none (WANDB_ENTITY).",
    )


class MLflowSpec(Section):
    """Logging to MLflow."""

    trackingUri: str = Field(
        min_length=1,
        max_length=1024,
        description="URI of the tracking server, or a file: or sqlite: URI. No default. verl: none "
        "(MLFLOW_TRACKING_URI).",
    )
    experiment: str = Field(
        min_length=1, max_length=256, description="Experiment to log to. No default. verl: trainer.project_name."
    )


class TrackingSpec(Section):
    """Metric sinks in addition to the run's own metrics file."""

    tensorboard: bool = Field(
        True,
        description="Write TensorBoard files to the run's output folder. Default true: they are cheap and need no "
        "service. verl: trainer.logger.",
    )
    wandb: WandBSpec | None = Field(
        None, description="Log to Weights & Biases. Default: disabled. verl: trainer.logger."
    )
    mlflow: MLflowSpec | None = Field(None, description="Log to MLflow. Default: disabled. verl: trainer.logger.")
