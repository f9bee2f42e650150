"""Images of programs that the test bed builds: each is one static file."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import IO

from images.archive import write_archive, write_layer
from tests.cluster.containerd import PAUSE, Containerd
from tests.testbed.binaries import Binaries


def load(containerd: Containerd, binaries: Binaries) -> None:
    """Gives containerd what holds every pod together, and KubeRay's operator."""
    containerd.load(lambda out: _write(out, PAUSE, Path(binaries["pause"]), "/pause"))
    named = re.search(r"^ +image: (\S+/operator:\S+)$", binaries.kuberay_installation.read_text(), re.MULTILINE)
    assert named, "KubeRay's own Deployment names its image"
    containerd.load(lambda out: _write(out, named[1], Path(binaries["kuberay-operator"]), "/manager"))


def _write(out: IO[bytes], name: str, program: Path, at: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        shutil.copy(program, root / at.lstrip("/"))
        layer = write_layer(root, Path(folder, "layer.tar"))
        write_archive(out, name, [layer], {"Entrypoint": [at], "User": "65532:65532"})
