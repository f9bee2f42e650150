"""spec.publication: the way from train workers to rollout replicas."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.problems import Problem

TransportName = Literal["SharedMemory", "ObjectStore", "RDMA"]
TransportChoice = Literal["Auto", "SharedMemory", "ObjectStore", "RDMA"]

NO_SHARED_MEMORY = Problem(
    "spec.publication.transport",
    "SharedMemory needs trainer and replicas on one Linux machine, and the pods of a training share no memory.",
    "Set it to Auto or ObjectStore.",
)
"""The problem of a training in pods whose weights should travel through shared memory."""


class PublicationSpec(Section):
    """Settings of the publication of weights to the rollout replicas."""

    transport: TransportChoice = Field(
        "Auto",
        description="How weights get from the train ranks to the replicas: SharedMemory, on one Linux machine outside "
        "of pods; ObjectStore, through Ray's; RDMA, by one-sided reads of NIXL. Default Auto: SharedMemory where it works, because replicas then share one copy, and "
        "otherwise ObjectStore, which needs no other package. verl: actor_rollout_ref.rollout.checkpoint_engine.backend.",
    )
    timeoutSeconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Maximum time, in seconds, for a replica to load a version; a replica that takes longer is "
        "replaced. Default 300: longer than the slowest transfer in verl's tables. verl: none.",
    )
