"""spec.accelerator: what a node holds."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.spec.base import Section

Profile = Literal["nvidia", "ascend", "cpu"]
MAX_NODES = 1024  # of one pool


class Accelerator(Section):
    """The devices of one node; rollout and train nodes are alike."""

    profile: Profile = Field(
        "nvidia",
        description="Kind of device: decides resource names, environment, collectives and image. nvidia, since most "
        "published recipes run there; cpu is for tests and laptops. verl: trainer.device.",
    )
    perNode: int = Field(
        8,
        ge=1,
        le=64,
        description="Devices of a node that the training uses; for cpu, worker processes. An Ascend A3 card counts "
        "as two. 8 is the usual server. verl: trainer.n_gpus_per_node.",
    )
