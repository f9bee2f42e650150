"""The manifest: a Qwen35Training object as users write it."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.training import TrainingSpec

API_VERSION: Literal["rl.qwen35.io/v1alpha1"] = "rl.qwen35.io/v1alpha1"
KIND: Literal["Qwen35Training"] = "Qwen35Training"

MetadataKey = Annotated[str, Field(min_length=1, max_length=317)]


class Metadata(Section):
    """Name, namespace, labels, annotations and finalizers of the object."""

    name: str = Field(
        max_length=40,
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        description="Name of the training: a letter, then lower-case letters, digits and dashes, at most 40 "
        "characters, so that the names of its child objects stay within their limits. No default. verl: "
        "trainer.experiment_name.",
    )
    namespace: str | None = Field(
        None,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Namespace. Default: that of the client. verl: none.",
    )
    labels: dict[MetadataKey, Annotated[str, Field(max_length=63)]] = Field(
        default_factory=dict,
        max_length=128,
        description="Labels. Queue labels are copied to the RayJob. Default: empty. verl: none.",
    )
    annotations: dict[MetadataKey, Annotated[str, Field(max_length=262_144)]] = Field(
        default_factory=dict, max_length=256, description="Annotations. Default: empty. verl: none."
    )
    finalizers: tuple[MetadataKey, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Finalizers. rl.qwen35.io/last-checkpoint has a last checkpoint saved before the training is deleted; without "
        "it, deletion waits for nothing. Default: none. verl: none.",
    )


class Manifest(Section):
    """One Qwen35Training object, as written in YAML."""

    apiVersion: Literal["rl.qwen35.io/v1alpha1"] = Field(description="API version of the object. verl: none.")
    kind: Literal["Qwen35Training"] = Field(description="Kind of the object. verl: none.")
    metadata: Metadata = Field(description="Name, namespace, labels, annotations and finalizers. verl: none.")
    spec: TrainingSpec = Field(description="The desired state of the training. verl: all of it.")
