"""The device that a worker computes on, and the communication backends of the train pool."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from qwen35_trainer.manifest.accelerator import ProfileName

DEVICE_TYPES: dict[ProfileName, str] = {"CPU": "cpu", "NVIDIA": "cuda", "Ascend": "npu"}
"""Accelerator profile → torch's name of the device."""
BACKENDS: dict[ProfileName, str] = {"CPU": "gloo", "NVIDIA": "cpu:gloo,cuda:nccl", "Ascend": "cpu:gloo,npu:hccl"}
"""Accelerator profile → torch's process-group backend. gloo reduces parameters that are offloaded to the host."""


def device(profile: ProfileName) -> torch.device:
    """Return the device of this process. Ray makes only one accelerator visible to each worker."""
    import torch

    if profile == "Ascend":
        importlib.import_module("torch_npu")  # registers the device with torch; only the Ascend images have this module
    return torch.device(DEVICE_TYPES[profile], 0) if profile != "CPU" else torch.device("cpu")
