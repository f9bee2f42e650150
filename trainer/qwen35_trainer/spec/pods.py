"""spec.pods: the pods of a cluster; `qwen35 run` has none and passes over them."""

from typing import Annotated, Any

from pydantic import Field, JsonValue

from qwen35_trainer.spec.base import Section

PodTemplate = Annotated[
    dict[str, JsonValue],
    Field(max_length=2, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]


class SecretKey(Section):
    """One key of a Secret in the training's namespace."""

    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Name of the Secret. No default. verl: none.",
    )
    key: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        description="Key whose value is used. No default. verl: none.",
    )


class Variable(Section):
    """An environment variable of every pod: exactly one of value and secret."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of the variable. No default. verl: none (ray_init.runtime_env).",
    )
    value: str | None = Field(
        None, max_length=4096, description="Its value, for what is no secret. No default. verl: none."
    )
    secret: SecretKey | None = Field(
        None, description="Where the value is read from when the pod starts. No default. verl: none."
    )


class Pods(Section):
    """What the pods of the pools are made from, beyond what the accelerator's profile says."""

    image: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        pattern=r"^\S+$",
        description="Trainer image of every pod. By default the operator's image for accelerator.profile. verl: none.",
    )
    environment: tuple[Variable, ...] = Field(
        (),
        strict=False,
        max_length=64,
        description="Environment variables of every pod, such as keys of metric services. Empty by default. verl: none.",
    )
    head: PodTemplate = Field(
        default_factory=dict[str, Any],
        description="Parts of a pod template (metadata, spec), merged into the head's by strategic merge. Empty by "
        "default. verl: none.",
    )
    rollout: PodTemplate = Field(
        default_factory=dict[str, Any],
        description="Parts of a pod template, merged into the rollout pool's by strategic merge. Empty by default. "
        "verl: none.",
    )
    train: PodTemplate = Field(
        default_factory=dict[str, Any],
        description="Parts of a pod template, merged into the train pool's by strategic merge. Empty by default. "
        "verl: none.",
    )
