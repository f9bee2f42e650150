"""The devices of this machine for a run without a cluster, and the device on which a worker computes.

Ray detects accelerators: NVIDIA's by NVML, Ascend's by AscendCL or /dev/davinci*. It assigns the devices that
CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES allow, and makes only one visible to each worker. This module counts
the devices in the same way, before Ray starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from qwen35_trainer.manifest import Problem, TrainingSpec

if TYPE_CHECKING:
    import torch
    from ray._private.accelerators.accelerator import AcceleratorManager

    from qwen35_trainer.manifest.accelerator import ProfileName

DEVICE_TYPES: dict[ProfileName, str] = {"CPU": "cpu", "NVIDIA": "cuda", "Ascend": "npu"}
"""Accelerator profile → torch's name for the type of device."""
BACKENDS: dict[ProfileName, str] = {"CPU": "gloo", "NVIDIA": "cpu:gloo,cuda:nccl", "Ascend": "cpu:gloo,npu:hccl"}
"""Accelerator profile → backends of torch's process group.

On accelerators, gloo is for parameters that are offloaded to host memory.
"""


def devices_here(profile: str) -> int:
    """Return the number of devices of the profile NVIDIA or Ascend that Ray can assign on this machine."""
    manager = manager_of(profile)
    count: int = manager.get_current_node_num_accelerators()
    visible = manager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def manager_of(profile: str) -> type[AcceleratorManager]:
    """Return Ray's class that counts the devices of the profile NVIDIA or Ascend. Importing Ray takes seconds."""
    from ray._private.accelerators import NPUAcceleratorManager, NvidiaGPUAcceleratorManager

    return {"NVIDIA": NvidiaGPUAcceleratorManager, "Ascend": NPUAcceleratorManager}[profile]


def too_few_devices(spec: TrainingSpec, here: int) -> list[Problem]:
    """Return a problem if this machine has too few devices for a spec; otherwise an empty list.

    here: number of devices of this machine. Each train worker needs one device, and each replica needs
    `rollout.tensorParallel` devices.
    """
    profile, train = spec.accelerator.profile, spec.world_size
    devices = spec.rollout.tensorParallel if spec.rollout else 1
    rollout = spec.rollout_replicas * devices + spec.lane_replicas
    if rollout + train <= here:
        return []
    needs = f"{train}" if spec.mode == "SFT" else f"{rollout} + {train}"
    message = f"{spec.mode} needs {needs} {profile} devices, and this machine has {here or 'none'}."
    elsewhere = f"Use a machine with {rollout + train}, kubectl apply the manifest, or set profile to CPU."
    if rollout and here == 1:
        message += f" With one device, rollout and training would have to share it, which {spec.mode} cannot yet."
    fewer = here * spec.accelerator.devicesPerNode // (rollout + train)
    if fewer:
        elsewhere = f"Set devicesPerNode to {fewer}. Or: {elsewhere}"
    return [Problem("spec.accelerator", message, elsewhere)]


def device(profile: ProfileName) -> torch.device:
    """Return the device of this process. Ray makes only one accelerator visible to each worker."""
    import torch

    if profile == "Ascend":
        importlib.import_module("torch_npu")  # registers the device with torch; only the Ascend images have this module
    return torch.device(DEVICE_TYPES[profile], 0) if profile != "CPU" else torch.device("cpu")
