"""The accelerators of this machine, for a run without a cluster.

Ray finds them by itself: NVIDIA's by NVML, Ascend's by AscendCL or /dev/davinci*. It hands out as many as CUDA_VISIBLE_DEVICES or
ASCEND_RT_VISIBLE_DEVICES leave, and shows each worker its own alone. This counts them in the same way, before Ray starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen35_trainer.spec import Problem, TrainingSpec

if TYPE_CHECKING:
    from ray._private.accelerators.accelerator import AcceleratorManager


def devices_here(profile: str) -> int:
    """Devices of the profile's kind that Ray will hand out on this machine."""
    manager = manager_of(profile)
    count: int = manager.get_current_node_num_accelerators()
    visible = manager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def manager_of(profile: str) -> type[AcceleratorManager]:
    """Ray's class that counts the devices of a profile. Imports Ray, which a run on CPUs need not wait for to be refused."""
    from ray._private.accelerators import NPUAcceleratorManager, NvidiaGPUAcceleratorManager

    return {"nvidia": NvidiaGPUAcceleratorManager, "ascend": NPUAcceleratorManager}[profile]


def too_few_devices(spec: TrainingSpec, here: int) -> list[Problem]:
    """What is wrong when this machine has so many devices: each worker needs one of its own. Pure."""
    profile, rollout, train = spec.accelerator.profile, spec.rollout_replicas + spec.lane_replicas, spec.world_size
    if rollout + train <= here:
        return []
    needs = f"{train}" if spec.mode == "SFT" else f"{rollout} + {train}"
    message = f"{spec.mode} needs {needs} {profile} devices, and this machine has {here or 'none'}."
    elsewhere = f"Use a machine with {rollout + train}, kubectl apply the manifest, or set profile to cpu."
    if rollout and here == 1:
        message += f" With one device, rollout and training would have to share it, which {spec.mode} cannot yet."
    fewer = here * spec.accelerator.perNode // (rollout + train)
    if fewer:
        elsewhere = f"Set perNode to {fewer}. Or: {elsewhere}"
    return [Problem("spec.accelerator", message, elsewhere)]
