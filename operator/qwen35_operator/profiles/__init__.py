"""Kinds of device, by the name that spec.accelerator.profile gives them."""

from collections.abc import Mapping
from typing import Final

from qwen35_operator.profiles.ascend import ASCEND
from qwen35_operator.profiles.base import HostPath, Profile, Size
from qwen35_operator.profiles.cpu import CPU
from qwen35_operator.profiles.nvidia import NVIDIA
from qwen35_trainer.spec.accelerator import Profile as ProfileName

PROFILES: Final[Mapping[ProfileName, Profile]] = {"nvidia": NVIDIA, "ascend": ASCEND, "cpu": CPU}

__all__ = ["PROFILES", "HostPath", "Profile", "Size"]
