"""What containerd knows when a node starts: the large layers of our images, taken and unpacked once.

    images.layers ──once──► <cache>/containerd-<hash>/ ──hard links──► the node's own folder

containerd never writes to a layer, so a copy of links is a copy; only its databases are really copied.
"""

import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from images.archive import Layer, write_archive
from images.build import write
from images.definition import definition
from images.layers import base_layers, cache, layers, locked
from tests.cluster.containerd import NAME, Containerd

BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")


def ready(images: Sequence[str]) -> bool:
    """Build the layers of these images. Returns whether containerd's folder exists too. Raises NotBuildable."""
    for image in images:
        layers(definition(image))
    return _kept(_base(images)).is_dir()


def prepare(containerd: Containerd, images: Sequence[str]) -> None:
    """Makes containerd's part unless it is there; nothing else runs afterwards. Raises NotBuildable and NotImported."""
    base = _base(images)
    with locked():
        _prepared(containerd, base)


def start(containerd: Containerd, images: Sequence[str]) -> None:
    """Starts it with these images of ours. Raises NotBuildable and NotImported."""
    base = _base(images)
    if base:
        with locked():
            _copy(_prepared(containerd, base), containerd.root)
    containerd.start()
    for image, present_layers in base.items():
        containerd.load(partial(write, image, present=present_layers))


def _base(images: Sequence[str]) -> dict[str, list[Layer]]:
    return {image: base_layers(definition(image)) for image in images}


def _kept(base: Mapping[str, Sequence[Layer]]) -> Path:
    digests = [layer.digest for image_layers in base.values() for layer in image_layers]
    return cache() / f"containerd-{hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]}"


def _prepared(containerd: Containerd, base: Mapping[str, Sequence[Layer]]) -> Path:
    folder = _kept(base)
    if folder.is_dir():
        return folder
    for outdated in cache().glob("containerd-*"):
        shutil.rmtree(outdated)
    maker = replace(containerd, folder=folder.with_suffix(".making"))
    maker.start()
    for image, image_layers in base.items():
        maker.load(partial(write_archive, name=f"layers.test/{image}:1", layers=image_layers, config={}))
    maker.processes.stop(NAME)
    for layer in {layer for image_layers in base.values() for layer in image_layers}:
        # The same bytes; one copy is enough.
        layer.file.unlink()
        layer.file.hardlink_to(maker.root / BLOBS / layer.digest)
    maker.root.rename(folder)
    shutil.rmtree(maker.folder)
    return folder


def _copy(prepared: Path, root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    links = ["--link"] if prepared.stat().st_dev == root.parent.stat().st_dev else []
    subprocess.run(["cp", "--archive", *links, prepared, root], check=True)
    for database in root.glob("*/*.db"):
        database.unlink()
        shutil.copy2(prepared / database.relative_to(root), database)
