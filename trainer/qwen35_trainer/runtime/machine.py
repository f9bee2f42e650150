"""The accelerators of this machine, for a run without a cluster.

Ray detects them: NVIDIA's by NVML, Ascend's by AscendCL or /dev/davinci*. It assigns those that CUDA_VISIBLE_DEVICES or
ASCEND_RT_VISIBLE_DEVICES allow, and makes only one visible to each worker. This module counts them in the same way, before Ray starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen35_trainer.manifest import Problem, TrainingSpec

if TYPE_CHECKING:
    from ray._private.accelerators.accelerator import AcceleratorManager


def devices_here(profile: str) -> int:
    """Return the number of devices of this profile that Ray can assign on this machine."""
    manager = manager_of(profile)
    count: int = manager.get_current_node_num_accelerators()
    visible = manager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def manager_of(profile: str) -> type[AcceleratorManager]:
    """Return Ray's class that counts the devices of a profile. Imports Ray here, so that a run on CPUs can be refused faster."""
    from ray._private.accelerators import NPUAcceleratorManager, NvidiaGPUAcceleratorManager

    return {"NVIDIA": NvidiaGPUAcceleratorManager, "Ascend": NPUAcceleratorManager}[profile]


def too_few_devices(spec: TrainingSpec, here: int) -> list[Problem]:
    """Return what is wrong when this machine has `here` devices. Each worker needs its own device. Pure."""
    profile, rollout, train = spec.accelerator.profile, spec.rollout_replicas + spec.lane_replicas, spec.world_size
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
