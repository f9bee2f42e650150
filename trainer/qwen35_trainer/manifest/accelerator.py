"""spec.accelerator: the devices of a node."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import Section

ProfileName = Literal["NVIDIA", "Ascend", "CPU"]
MAX_NODES = 1024
"""Maximum number of nodes of a pool."""


class AcceleratorSpec(Section):
    """The devices of one node. All nodes of the rollout pool and the train pool have the same devices."""

    profile: ProfileName = Field(
        "NVIDIA",
        description="Kind of device. It decides resource names, environment variables, the collective library and the"
        " default image. Default NVIDIA, on which most published recipes run; CPU is for tests and "
        "laptops. verl: trainer.device.",
    )
    devicesPerNode: int = Field(
        8,
        ge=1,
        le=64,
        description="Devices of a node that the training uses; with profile CPU, worker processes. An Ascend A3 card "
        "counts as two. Default 8, as most servers have. verl: trainer.n_gpus_per_node.",
    )
