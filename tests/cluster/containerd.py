"""Debian's containerd, runc and CNI plugins, with separate folders, socket and bridge for the node."""

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.cluster.namespaces import Namespaces
from tests.testbed.processes import Processes

NAME = "containerd"
PAUSE = "registry.k8s.io/pause:3.10"
PLUGINS = Path("/usr/lib/cni")
CONFIGURATION = """\
version = 2
root = "{root}"
state = "{folder}/state"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # A machine may deny root the right to protect a process from the kernel's memory killer.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


class NotImported(Exception):
    """containerd does not take an image; says why."""


@dataclass(frozen=True)
class Containerd:
    folder: Path
    processes: Processes
    namespaces: Namespaces

    @property
    def root(self) -> Path:
        """Images, and the files of containers."""
        return self.folder / "root"

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    def start(self) -> None:
        """Returns once it takes images."""
        (self.folder / "cni").mkdir(parents=True, exist_ok=True)
        configuration = self.folder / "config.toml"
        configuration.write_text(CONFIGURATION.format(folder=self.folder, root=self.root, pause=PAUSE, plugins=PLUGINS))
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(self._network(), indent=2))
        self.processes.start(NAME, self.namespaces.command("containerd", f"--config={configuration}"))
        self.processes.wait(NAME, self._listening)

    def load(self, write: Callable[[IO[bytes]], object]) -> None:
        """Takes the image whose archive `write` writes. Raises NotImported."""
        command = [*self._command(), "images", "import", "-"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as taking:
            assert taking.stdin
            assert taking.stderr
            # A containerd that rejects an archive does not read it to its end; its error message is more useful.
            with suppress(BrokenPipeError), taking.stdin:
                write(taking.stdin)
            message = taking.stderr.read().decode()
        if taking.returncode:
            raise NotImported(message.strip())

    def _listening(self) -> bool:
        return subprocess.run([*self._command(), "images", "list"], capture_output=True, check=False).returncode == 0

    def _command(self) -> list[str]:
        return ["ctr", f"--address={self.socket}", "--namespace=k8s.io"]

    def _network(self) -> dict[str, object]:
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": self.namespaces.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(self.folder / "addresses"),
        }
        bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "ipMasq": True, "hairpinMode": True}
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge | {"ipam": addresses}, ports]}
