"""Accelerators: memory and peak speeds of one device, with the source of each figure.

Most sources are pages that quote data sheets; they were read on 2026-11-26. Figures for one die of the Ascend 910C are
quoted from pages that cite arXiv:2506.12708; of the paper itself only the abstract was read. Product names in node
labels are from memory and were not checked on nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from qwen35_trainer.catalog.links import LinkName
from qwen35_trainer.manifest.accelerator import ProfileName

DeviceName = Literal["H100", "H200", "H20", "A100", "B200", "B300", "Ascend-910B", "Ascend-910C"]

GB: Final = 1e9
"""Bytes of a gigabyte in data sheets, which count memory and bandwidth in powers of ten."""
GIB: Final = 1 << 30


@dataclass(frozen=True)
class Device:
    """One accelerator device, as a process sees it. An Ascend 910C has two dies, each of which is a device."""

    profile: ProfileName
    memory: float
    """Bytes that a process can allocate: the total capacity in PyTorch's out-of-memory messages. The data sheet states more."""
    flops: float
    """Peak dense bfloat16 floating-point operations per second."""
    bandwidth: float
    """Peak bytes per second between the device's memory and its cores."""
    within_node: LinkName
    between_nodes: LinkName
    to_host: LinkName
    source: str
    """The source of the figures, and what it states."""
    product: str | None = None
    """Value of the node label nvidia.com/gpu.product for this device (NVIDIA's GPU feature
    discovery); None for other vendors."""


DEVICES: Final[dict[DeviceName, Device]] = {
    "H100": Device(
        *("NVIDIA", 79.18 * GIB, 989e12, 3350 * GB, "NVLink4", "IB-400G", "PCIe5"),
        "https://glennklockwood.com/garden/processors/h100, from NVIDIA's data sheet of H100 SXM: 80 GB, 989.4 TFLOP/s dense bf16, "
        "3.35 TB/s. torch: total capacity of 79.18 or 79.19 GiB.",
        product="NVIDIA-H100-80GB-HBM3",
    ),
    "H200": Device(
        *("NVIDIA", 139.8 * GIB, 989e12, 4800 * GB, "NVLink4", "IB-400G", "PCIe5"),
        "https://aiwiki.ai/wiki/nvidia_h200: 141 GB, 4.8 TB/s, cores as in H100. torch: total capacity of 139.80 or 139.81 GiB.",
        product="NVIDIA-H200",
    ),
    "H20": Device(
        *("NVIDIA", 95.0 * GIB, 148e12, 4000 * GB, "NVLink4", "IB-400G", "PCIe5"),
        "https://willitrunai.com/es/gpus/h20-96gb: 96 GB, 148 TFLOP/s dense fp16, 4.0 TB/s, NVLink of 900 GB/s. torch reports 95.0 to "
        "95.2 GiB for GPUs of 96 GB. The variant with 141 GB is not in the catalog.",
        product="NVIDIA-H20",
    ),
    "A100": Device(
        *("NVIDIA", 79.15 * GIB, 312e12, 2039 * GB, "NVLink3", "IB-200G", "PCIe4"),
        "https://glennklockwood.com/garden/processors/A100, from NVIDIA's data sheet of A100 SXM 80 GB: 312 TFLOP/s dense bf16, 2.039 TB/s. "
        "torch: total capacity of 79.14 or 79.15 GiB.",
        product="NVIDIA-A100-SXM4-80GB",
    ),
    "B200": Device(
        *("NVIDIA", 178.35 * GIB, 2250e12, 8000 * GB, "NVLink5", "IB-400G", "PCIe5"),
        "https://glennklockwood.com/garden/processors/B200: HGX B200 at 1,000 W has 2,250 TFLOP/s dense bf16, 8 TB/s. "
        "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview: 179 GB. torch: total capacity of 178.35 GiB.",
        product="NVIDIA-B200",
    ),
    "B300": Device(
        *("NVIDIA", 267.69 * GIB, 2250e12, 8000 * GB, "NVLink5", "IB-800G", "PCIe6"),
        "https://glennklockwood.com/garden/processors/B300: 288 GB, 2,250 TFLOP/s dense bf16, 8 TB/s, PCIe 6. torch: total capacity of "
        "267.69 GiB.",
        product="NVIDIA-B300-SXM6-AC",
    ),
    "Ascend-910B": Device(
        *("Ascend", 60.96 * GIB, 313e12, 1600 * GB, "HCCS", "RoCE-200G", "PCIe4"),
        "910B3 of an Atlas 800T A2, in the variant with 64 GB: 313 TFLOP/s fp16 and bf16 "
        "(https://jdc.huawei.com/jdc/refactor/viewthread?tid=1175654, as cited by users), 1.6 TB/s. A 910B4 has 280 TFLOP/s "
        "(https://ai.gitee.com/docs/compute/clusters_gpu/ascend_gpu) and half the bandwidth. torch_npu: 60.96 or 60.97 GiB total capacity.",
    ),
    "Ascend-910C": Device(
        *("Ascend", 61.27 * GIB, 376e12, 1600 * GB, "HCCS-UB", "RoCE-200G", "PCIe5"),
        "Serving Large Language Models on Huawei CloudMatrix384 (https://arxiv.org/html/2506.12708v2), section 3: per die 64 GB, "
        "376 TFLOP/s dense bf16, 1.6 TB/s. 384 chips of two dies give 289 PFLOP/s, and https://semivoice.com/post/3a06fb82 reports 300. "
        "torch_npu: 61.27 or 61.28 GiB total.",
    ),
}
DEFAULT_DEVICES: Final[dict[ProfileName, DeviceName]] = {"NVIDIA": "H100", "Ascend": "Ascend-910B"}
"""Profile → the device that is assumed if the user names none. A manifest contains only the profile."""


def largest_device(profile: ProfileName) -> DeviceName | None:
    """Return the name of the profile's device with the most memory; None for profile CPU, which has no devices."""
    names = [name for name, device in DEVICES.items() if device.profile == profile]
    return max(names, key=lambda name: DEVICES[name].memory, default=None)
