"""Links between devices, and between a device and its host: bytes per second in one direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

LinkName = Literal["NVLink4", "NVLink3", "IB-400G", "IB-200G", "RoCE-200G", "HCCS", "HCCS-UB", "PCIe4", "PCIe5"]


@dataclass(frozen=True)
class DeviceLink:
    """The link of one device, with all others of its kind busy."""

    bandwidth: float
    """Peak bytes per second in one direction."""
    source: str


LINKS: Final[dict[LinkName, DeviceLink]] = {
    "NVLink4": DeviceLink(450e9, "NVIDIA H100 SXM datasheet: 900 GB/s in both directions together."),
    "NVLink3": DeviceLink(300e9, "NVIDIA A100 SXM datasheet: 600 GB/s in both directions together."),
    "IB-400G": DeviceLink(50e9, "NVIDIA DGX H100 datasheet: one ConnectX-7 port of 400 Gb/s for each GPU."),
    "IB-200G": DeviceLink(25e9, "NVIDIA DGX A100 datasheet: one ConnectX-6 port of 200 Gb/s for each GPU."),
    "RoCE-200G": DeviceLink(
        25e9, "Huawei Atlas 800T A2, and arXiv:2506.12708, section 3: one 200 Gb/s port for each device."
    ),
    "HCCS": DeviceLink(
        196e9, "Huawei Atlas 800T A2: 392 GB/s in both directions together, 56 GB/s to each of seven devices."
    ),
    "HCCS-UB": DeviceLink(
        196e9, "arXiv:2506.12708, section 3: 196 GB/s in one direction for each die, in the UB plane."
    ),
    "PCIe4": DeviceLink(32e9, "PCI Express 4.0 × 16, one direction."),
    "PCIe5": DeviceLink(64e9, "NVIDIA H100 SXM datasheet: 128 GB/s in both directions together."),
}
