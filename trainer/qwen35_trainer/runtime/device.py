"""The device that a worker computes on, and what carries tensors between the ranks of the train pool."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from qwen35_trainer.spec.accelerator import Profile

KINDS: dict[Profile, str] = {"cpu": "cpu", "nvidia": "cuda", "ascend": "npu"}
"""By accelerator profile: torch's name of the device."""
BACKENDS: dict[Profile, str] = {"cpu": "gloo", "nvidia": "cpu:gloo,cuda:nccl", "ascend": "cpu:gloo,npu:hccl"}
"""By accelerator profile: what carries tensors. Parked parameters are reduced on the host."""


def device(profile: Profile) -> torch.device:
    """The device of this process: Ray shows each worker its own accelerator alone."""
    import torch

    if profile == "ascend":
        importlib.import_module("torch_npu")  # makes the device known to torch; its images have it
    return torch.device(KINDS[profile], 0) if profile != "cpu" else torch.device("cpu")
