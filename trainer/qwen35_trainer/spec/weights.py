"""spec.weights: the way from train workers to rollout replicas."""

from pydantic import Field

from qwen35_trainer.spec.base import Section


class Weights(Section):
    """The publication of weights."""

    timeoutSeconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Longest time for a replica to take a version, in seconds; then it is dropped. 300 is above the "
        "slowest transfer in verl's tables. verl: none.",
    )
