"""Links between devices, and between a device and its host: bytes per second in one direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

LinkName = Literal[
    "NVLink5",
    "NVLink4",
    "NVLink3",
    "IB-800G",
    "IB-400G",
    "IB-200G",
    "RoCE-200G",
    "HCCS",
    "HCCS-UB",
    "PCIe4",
    "PCIe5",
    "PCIe6",
]


@dataclass(frozen=True)
class DeviceLink:
    """The link of one device. The bandwidth is what the device gets while all other devices use their links too."""

    bandwidth: float
    """Peak bytes per second in one direction."""
    source: str


_MLPERF: Final = "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
LINKS: Final[dict[LinkName, DeviceLink]] = {
    "NVLink5": DeviceLink(900e9, "https://glennklockwood.com/garden/processors/B200: 2 × 900 GB/s."),
    "NVLink4": DeviceLink(450e9, f"{_MLPERF}: 18 links of the 4th generation, 900 GB/s in both directions together."),
    "NVLink3": DeviceLink(300e9, "https://glennklockwood.com/garden/processors/A100: 300 + 300 GB/s."),
    "IB-800G": DeviceLink(
        100e9, "https://fibermall.com/blog/?p=17161: HGX B300 has 1.6 TB/s of network in both directions for 8 GPUs."
    ),
    "IB-400G": DeviceLink(
        50e9,
        f"{_MLPERF}: ports of 400 Gb/s, 500 GB/s between PCIe and network for 8 GPUs and storage. https://fibermall.com/blog/?p=17161: "
        "HGX B200 has 0.8 TB/s in both directions for 8 GPUs.",
    ),
    "IB-200G": DeviceLink(
        25e9,
        "NVIDIA DGX A100 System User Guide (DU-09821-001): a ConnectX-6 port of 200 Gb/s for each GPU. Not read again.",
    ),
    "RoCE-200G": DeviceLink(
        25e9,
        "https://arxiv.org/html/2506.12708v2, section 3: 200 Gb/s for each die. Atlas 800T A2: a port of 200 Gb/s for each NPU.",
    ),
    "HCCS": DeviceLink(
        196e9,
        "https://arthurchiao.art/blog/gpu-data-sheets: 910B, 56 GB/s to each of seven devices, 392 GB/s together. That is both directions "
        "(https://support.huawei.com/enterprise/zh/doc/EDOC1100317202, as cited by users).",
    ),
    "HCCS-UB": DeviceLink(
        196e9,
        "https://arxiv.org/html/2506.12708v2, section 3: 196 GB/s in one direction for each die, in the UB plane. Not read again.",
    ),
    "PCIe4": DeviceLink(32e9, "https://glennklockwood.com/garden/processors/A100: PCIe 4.0 × 16, 32 + 32 GB/s."),
    "PCIe5": DeviceLink(
        64e9, "https://glennklockwood.com/garden/processors/h100: 128 GB/s in both directions together."
    ),
    "PCIe6": DeviceLink(
        128e9, "https://glennklockwood.com/garden/processors/B300: PCIe 6.0 × 16, 256 GB/s in both directions together."
    ),
}
