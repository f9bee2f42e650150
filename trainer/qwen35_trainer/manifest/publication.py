"""spec.publication: how weights get from the train workers to the rollout replicas."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import PathName, Section
from qwen35_trainer.manifest.problems import Problem

TransportName = Literal["SharedMemory", "ObjectStore", "Folder", "RDMA"]
TransportChoice = Literal["Auto", "SharedMemory", "ObjectStore", "Folder", "RDMA"]

DEFAULT_BUCKET_MEBIBYTES = 256
"""Default size of a bucket of a publication, in MiB."""
NO_SHARED_MEMORY = Problem(
    "spec.publication.transport",
    "SharedMemory needs trainer and replicas on one Linux machine, and the pods of a training share no memory.",
    "Set it to Auto or ObjectStore.",
)
"""The problem of a manifest with the transport SharedMemory whose training runs in pods."""


RELATIVE_FOLDER = Problem(
    "spec.publication.folder",
    "The path is relative, and pods have no folder of the manifest.",
    "Use the path at which spec.pods mounts the volume.",
)
"""The problem of a manifest with a relative path in publication.folder whose training runs in pods."""


class PublicationSpec(Section):
    """Settings of the publication of weights to the rollout replicas."""

    transport: TransportChoice = Field(
        "Auto",
        description="How weights get from the train ranks to the replicas: SharedMemory, on one Linux machine outside "
        "of pods; ObjectStore, through Ray's; Folder, through files in publication.folder; RDMA, by one-sided reads with NIXL. Default Auto: SharedMemory where it works, because "
        "replicas then share one copy, and otherwise ObjectStore, which needs nothing else. Auto never chooses RDMA, because only a transfer "
        "between the nodes of both pools shows whether it is fast: without a usable device NIXL falls back to TCP. verl: actor_rollout_ref.rollout.checkpoint_engine.backend.",
    )
    folder: PathName | None = Field(
        None,
        description="Folder on a volume that the pods of both pools mount for writing, for the transport Folder; each run has its own "
        "subfolder. In a cluster an absolute path, elsewhere relative to the manifest. No default. verl: none.",
    )
    wholeEvery: int = Field(
        1,
        ge=1,
        le=100,
        description="Every wholeEvery-th version is published whole, those between as the values that have changed, where "
        "that is smaller; the result is the same, bit for bit. With ObjectStore and Folder; SharedMemory moves no bytes, RDMA whole versions. Default 1, "
        "because changes need the version before in the memory of trainer and replicas. verl: none.",
    )
    bucketMebibytes: int = Field(
        DEFAULT_BUCKET_MEBIBYTES,
        ge=32,
        le=65_536,
        description="Maximum size, in MiB, of a bucket: the tensors that a rank stores and a replica fetches together. Each has one in "
        "memory. With ObjectStore and Folder; SharedMemory and RDMA have no buckets. Default 256: the time for each is small "
        "next to its transfer, and larger ones take more memory. verl: "
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes.",
    )
    maxLogProbDifference: float = Field(
        0.1,
        ge=0,
        le=100,
        description="Largest mean difference, in nats, between the log-probabilities that a replica and the trainer compute for the "
        "same tokens with the same version. A replica above it is replaced; if all are, the training fails. They are compared after "
        "a publication, on the first prompts of the data, if the train ranks' forward pass for it takes at most 1 % of their time, or no "
        "longer than they waited for their last batch. 0 compares nothing. Default 0.1: five times the 0.02 that bfloat16 kernels may differ by, and less than a wrong layer causes; raise "
        "it for mixture-of-experts models in bfloat16, whose routers may choose other experts. verl: none.",
    )
    timeoutSeconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Maximum time, in seconds, for a replica to load a version; a replica that takes longer is "
        "replaced. Default 300: longer than the slowest transfer in verl's tables. verl: none.",
    )
