"""The node's own network and mounts: to kubelet, kube-proxy and CNI a second machine.

    this machine                       the node
    API server ── qwen35-N ═══════ eth0 ── bridge ── pods
                      (a pair of virtual devices)

    python -m tests.cluster.namespaces FILE

Writes JSON `{"pid": ..., "host": ..., "node": ..., "pods": ...}` to FILE and waits for SIGTERM. Bridges, routes, packet
filter rules, mounts and the namespaces of pods all live in the two namespaces, so the kernel removes them with the
last process of the node, however that ended.
"""

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.testbed.addresses import NETWORKS, take
from tests.testbed.api_server import SERVICES

# What kubelet sets on the machine that it takes for its own.
SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
# Where containerd, runc, CNI and kubelet keep things however they are configured.
PRIVATE = ("/run", "/var/log", "/var/lib/cni")


@dataclass(frozen=True)
class Namespaces:
    pid: int
    """The process whose namespaces they are."""
    host: str
    """Address of this machine, as the node and its pods reach it."""
    node: str
    """Address of the node."""
    pods: str
    """Network of the pods."""

    def command(self, *words: str) -> list[str]:
        """Runs a command on the node."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--", *words]


def hold(file: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    number, lock = take()
    link = list(NETWORKS[number].subnets(new_prefix=30))[-1]
    host, node = map(str, link.hosts())
    pods = next(NETWORKS[number].subnets(new_prefix=24))
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS)
    _mount()
    _connect(f"qwen35-{number}", outside, link.with_prefixlen.partition("/")[2], host, node, pods)
    os.close(outside)
    aside = file.with_suffix(".writing")
    aside.write_text(json.dumps(asdict(Namespaces(os.getpid(), host, node, str(pods)))))
    aside.rename(file)
    signal.sigwait([signal.SIGTERM])
    lock.close()


def _mount() -> None:
    """Make later mounts private to the node, and shared among its processes, which kubelet requires."""
    _run("mount", "--make-rprivate", "/")
    _run("mount", "--make-rshared", "/")
    for folder in PRIVATE:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "qwen35", folder)
    # These are the kernel's, of which there is one: kubelet gets files in their place.
    for name in SYSCTLS:
        real, own = Path("/proc/sys", name), Path("/run/sysctl", name)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(real.read_bytes())
        _run("mount", "--bind", str(own), str(real))


def _connect(device: str, outside: int, prefix: str, host: str, node: str, pods: ipaddress.IPv4Network) -> None:
    here = ["nsenter", f"--net=/proc/self/fd/{outside}", "--"]
    _run(
        *here,
        "ip",
        "link",
        "add",
        device,
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        str(os.getpid()),
        keep=outside,
    )
    _run(*here, "ip", "address", "add", f"{host}/{prefix}", "dev", device, keep=outside)
    _run(*here, "ip", "link", "set", device, "up", keep=outside)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{node}/{prefix}", "dev", "eth0")
    _run("ip", "link", "set", "eth0", "up")
    # No default route: connections out of the cluster are rejected immediately instead of timing out. Services have
    # addresses that kube-proxy replaces, but only of packets that have a route.
    _run("ip", "route", "add", str(SERVICES), "dev", "eth0")
    _run(*here, "ip", "route", "add", str(pods), "via", node, keep=outside)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")


def _run(name: str, *words: str, keep: int | None = None) -> None:
    # Not in every user's PATH.
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") or name
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, check=False, pass_fds=() if keep is None else (keep,)
    )
    if done.returncode:
        sys.exit(f"`{' '.join([name, *words])}` failed: {done.stderr.strip()}")


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
