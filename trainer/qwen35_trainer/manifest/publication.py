"""spec.publication: the way from train workers to rollout replicas."""

from pydantic import Field

from qwen35_trainer.manifest.base import Section


class PublicationSpec(Section):
    """Settings of the publication of weights to the rollout replicas."""

    timeoutSeconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Maximum time, in seconds, for a replica to load a version; a replica that takes longer is "
        "replaced. Default 300: longer than the slowest transfer in verl's tables. verl: none.",
    )
