"""The manifest: a Qwen35Training object as people write it."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.spec.base import Section
from qwen35_trainer.spec.training import TrainingSpec

API_VERSION: Literal["rl.qwen35.io/v1alpha1"] = "rl.qwen35.io/v1alpha1"
KIND: Literal["Qwen35Training"] = "Qwen35Training"

MetadataKey = Annotated[str, Field(min_length=1, max_length=317)]


class Metadata(Section):
    """Who the object is."""

    name: str = Field(
        max_length=40,
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        description="Name of the training: a letter, then lower-case letters, digits and dashes, at most 40, so that the names of its "
        "child objects fit their limits. No default. verl: trainer.experiment_name.",
    )
    namespace: str | None = Field(
        None,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Namespace. By default the client's. verl: none.",
    )
    labels: dict[MetadataKey, Annotated[str, Field(max_length=63)]] = Field(
        default_factory=dict, max_length=128, description="Labels; queue labels go to the job. Empty. verl: none."
    )
    annotations: dict[MetadataKey, Annotated[str, Field(max_length=262_144)]] = Field(
        default_factory=dict, max_length=256, description="Annotations. Empty by default. verl: none."
    )


class Manifest(Section):
    """One Qwen35Training object."""

    apiVersion: Literal["rl.qwen35.io/v1alpha1"] = Field(description="Version of this format. verl: none.")
    kind: Literal["Qwen35Training"] = Field(description="Kind of object. verl: none.")
    metadata: Metadata = Field(description="Who the object is. verl: none.")
    spec: TrainingSpec = Field(description="What the training is. verl: all of it.")
