"""What a machine must have for a real node to run on it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from images import system
from images.definition import definition
from tests.cluster import cgroups
from tests.cluster.containerd import PLUGINS

PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "mount": "mount",
    "openssl": "openssl",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
KERNEL = {
    "/proc/sys/net/bridge/bridge-nf-call-iptables": "br_netfilter",
    "/proc/sys/net/netfilter/nf_conntrack_max": "nf_conntrack",
}

IMAGES = ("operator", "trainer-cpu")
"""The images that a node runs."""


def missing() -> str | None:
    """Why no node can run here; None when one can."""
    if sys.platform != "linux":
        return f"a node needs Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "a node needs root"
    return "; ".join(_missing()) or None


def _missing() -> Iterator[str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)}
    if not (PLUGINS / "bridge").exists():
        absent.add("containernetworking-plugins")
    try:
        absent.update(system.absent([package for image in IMAGES for package in definition(image).packages]))
    except system.NotBuildable as problem:
        yield str(problem)
    if absent:
        yield f"a node needs these Debian packages: {' '.join(sorted(absent))}"
    elif subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode:
        yield "a node needs the right to make namespaces, which root has not in this container"
    if not cgroups.hierarchies():
        yield f"a node needs control groups, and {cgroups.ROOT} has none that can be written"
    for file, feature in KERNEL.items():
        if not Path(file).exists():
            yield f"a node needs the kernel's {feature}, and {file} is not there: modprobe {feature}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        yield "a node needs the kernel's overlay: modprobe overlay"
