"""spec.pods: the pods of a cluster; `qwen35 run` has no pods and ignores this section."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from qwen35_trainer.manifest.base import Section

PodTemplate = Annotated[
    dict[str, JsonValue],
    Field(max_length=2, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]


class SecretKeySpec(Section):
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
        description="Key in the Secret. No default. verl: none.",
    )


class ValueFromSpec(Section):
    """The source of a variable's value, as in a Kubernetes container."""

    secretKeyRef: SecretKeySpec = Field(
        description="Key of a Secret, which is read when the pod starts. No default. verl: none."
    )


class VariableSpec(Section):
    """An environment variable of every pod: exactly one of value and valueFrom."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of the variable. No default. verl: none (ray_init.runtime_env).",
    )
    value: str | None = Field(
        None,
        max_length=4096,
        description="Value of the variable, visible to everyone who may read the manifest. No default. verl: none.",
    )
    valueFrom: ValueFromSpec | None = Field(None, description="Secret that holds the value. No default. verl: none.")


class TLSSpec(Section):
    """Encryption of Ray's own connections between the pods of a training."""

    secretName: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Name of a Secret in the training's namespace with a certificate authority: its certificate as tls.crt and "
        "its private key as tls.key, as in the Secret of a cert-manager Certificate with isCA. Each pod makes its own "
        "certificate with it before Ray starts. No default. verl: none.",
    )


class PodsSpec(Section):
    """Additions to the pods that the accelerator profile describes."""

    image: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        pattern=r"^\S+$",
        description="Trainer image of every pod. Default: the operator's image for accelerator.profile. verl: none.",
    )
    env: tuple[VariableSpec, ...] = Field(
        (),
        strict=False,
        max_length=64,
        description="Environment variables of every pod, such as keys of metric services. Default: empty. verl: none.",
    )
    sizing: Literal["Planned", "Profile"] = Field(
        "Planned",
        description="How the memory of worker pods is determined. Planned: what `qwen35 plan` computes, where that is more than "
        "the profile's memory, for random models and those of the catalog; a new training is refused if a rank or a "
        "replica needs more than the largest device of the profile in the catalog has. Profile: the memory of "
        "accelerator.profile for each device, and nothing is refused, for larger devices and for plans that are wrong. "
        "Resources in the templates below override both. Default: Planned, because a pod with too little memory is "
        "killed long after it has started. verl: none.",
    )
    tls: TLSSpec | None = Field(
        None,
        description="Ray's TLS: the processes of Ray encrypt their connections, and accept only peers with a certificate of this authority. "
        "Neither Ray's dashboard nor connections outside of Ray are encrypted, such as NCCL's. Default: none, "
        "because it needs a certificate authority, and costs time where much data passes through Ray. verl: none.",
    )
    head: PodTemplate = Field(
        default_factory=dict[str, Any],
        description="Parts of a pod template (metadata, spec) that are merged into the head pod's by strategic merge."
        " Default: empty. verl: none.",
    )
    rollout: PodTemplate = Field(
        default_factory=dict[str, Any],
        description="Parts of a pod template that are merged into the rollout pool's by strategic merge. Default: "
        "empty. verl: none.",
    )
    train: PodTemplate = Field(
        default_factory=dict[str, Any],
        description="Parts of a pod template that are merged into the train pool's by strategic merge. Default: "
        "empty. verl: none.",
    )
