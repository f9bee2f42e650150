"""Accelerators: memory and peak speeds of one device, from the makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from qwen35_trainer.catalog.links import LinkName
from qwen35_trainer.manifest.accelerator import ProfileName

DeviceName = Literal["H100", "H200", "H20", "A100", "Ascend-910B", "Ascend-910C"]

GB: Final = 1e9
"""Data sheets count memory and bandwidth in powers of ten, except the memory of GPUs: their "80 GB" are 80 GiB less reserved."""
GIB: Final = 1 << 30


@dataclass(frozen=True)
class Device:
    """One device, as a process sees it. An Ascend 910C has two dies, each of which is a device."""

    profile: ProfileName
    memory: float
    """Bytes that a process can allocate."""
    flops: float
    """Peak dense bfloat16 operations per second."""
    bandwidth: float
    """Peak bytes per second between memory and cores."""
    within_node: LinkName
    between_nodes: LinkName
    to_host: LinkName
    source: str


DEVICES: Final[dict[DeviceName, Device]] = {
    "H100": Device(
        *("NVIDIA", 79.1 * GIB, 989e12, 3350 * GB, "NVLink4", "IB-400G", "PCIe5"),
        "NVIDIA H100 SXM datasheet: 80 GB, 989 TFLOP/s dense bf16, 3.35 TB/s. torch.cuda.mem_get_info reports 79.1 GiB.",
    ),
    "H200": Device(
        *("NVIDIA", 139.8 * GIB, 989e12, 4800 * GB, "NVLink4", "IB-400G", "PCIe5"),
        "NVIDIA H200 SXM datasheet: 141 GB, 989 TFLOP/s dense bf16, 4.8 TB/s.",
    ),
    "H20": Device(
        *("NVIDIA", 95.1 * GIB, 148e12, 4000 * GB, "NVLink4", "IB-400G", "PCIe5"),
        "NVIDIA HGX H20 datasheet: 96 GB, 148 TFLOP/s dense bf16, 4.0 TB/s.",
    ),
    "A100": Device(
        *("NVIDIA", 79.2 * GIB, 312e12, 2039 * GB, "NVLink3", "IB-200G", "PCIe4"),
        "NVIDIA A100 80GB SXM datasheet: 80 GB, 312 TFLOP/s dense bf16, 2.039 TB/s.",
    ),
    "Ascend-910B": Device(
        *("Ascend", 61.3 * GIB, 313e12, 1600 * GB, "HCCS", "RoCE-200G", "PCIe4"),
        "Huawei Atlas 800T A2 (910B3): 64 GB, 313 TFLOP/s FP16, 1.6 TB/s.",
    ),
    "Ascend-910C": Device(
        *("Ascend", 61.3 * GIB, 376e12, 1600 * GB, "HCCS-UB", "RoCE-200G", "PCIe5"),
        "Serving Large Language Models on Huawei CloudMatrix384 (arXiv:2506.12708), section 3: per die 64 GB, "
        "376 TFLOP/s dense bf16, 1.6 TB/s.",
    ),
}
DEFAULT_DEVICES: Final[dict[ProfileName, DeviceName]] = {"NVIDIA": "H100", "Ascend": "Ascend-910B"}
"""The device that is assumed for a profile when none is named: a manifest names the profile only."""
