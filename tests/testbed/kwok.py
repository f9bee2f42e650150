"""Nodes without machines: kwok keeps them ready and lets their pods run and end."""

from pathlib import Path
from typing import Any

from tests.testbed.api import Api, is_true
from tests.testbed.binaries import Binaries
from tests.testbed.processes import Processes, free_ports

NAME = "kwok"
# Nodes come in pairs: enough to tell one from another.
DEVICES = {"gpu": {"nvidia.com/gpu": "8"}, "npu": {"huawei.com/Ascend910": "8"}, "cpu": {}}
NODES = {f"{kind}-{number}": devices for kind, devices in DEVICES.items() for number in (0, 1)}


def start(binaries: Binaries, processes: Processes, kubeconfig: Path, network: str) -> None:
    """`network` is where pods get their addresses from."""
    command = [
        binaries[NAME],
        f"--kubeconfig={kubeconfig}",
        "--manage-all-nodes=true",
        f"--cidr={network}",
        "--node-ip=198.51.100.1",
        "--node-lease-duration-seconds=40",
        f"--server-address=127.0.0.1:{free_ports(1)[0]}",
    ]
    processes.start(NAME, command)


def add_nodes(api: Api) -> None:
    for name, devices in NODES.items():
        api.post("/api/v1/nodes", node(name, devices))


def nodes_ready(api: Api) -> bool:
    nodes = api.get("/api/v1/nodes")["items"]
    return len(nodes) == len(NODES) and all(is_true(node["status"], "Ready") for node in nodes)


def node(name: str, devices: dict[str, str]) -> dict[str, Any]:
    """A node with these devices, and with room for thousands of pods."""
    # Room for thousands of pods: what runs out in tests is devices.
    resources = {"cpu": "2000", "memory": "20000Gi", "ephemeral-storage": "20000Gi", "pods": "2000"} | devices
    return {
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "testbed": name.partition("-")[0],
            },
        },
        "status": {"capacity": resources, "allocatable": resources},
    }
