"""Writes layers, and archives of images in the format of the Open Container Initiative, without container tools.

Layers are not compressed: a container runtime reads the archive directly, and the disk is faster than gzip. Layers are
reproducible: they have no times and no owners except root, and names are sorted.
"""

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Buffer, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class Layer:
    """A finished layer in a file."""

    file: Path
    digest: str
    """SHA-256 of the file, in hexadecimal."""
    size: int


class _Hashing(io.RawIOBase):
    """Counts and hashes the bytes that are written to another file."""

    def __init__(self, below: IO[bytes]) -> None:
        self.below, self.hash, self.size = below, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        self.hash.update(data)
        self.size += memoryview(data).nbytes
        return self.below.write(data)


def write_layer(folder: Path, file: Path, owners: Mapping[str, int] | None = None) -> Layer:
    """Pack a folder. Root owns all files except the paths in `owners`, which gives the id of a user and group."""
    numbers = {path.lstrip("/"): user for path, user in (owners or {}).items()}

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = numbers.get(member.name, 0)
        member.uname = member.gname = ""
        member.mtime = 0
        return member

    with file.open("wb") as below:
        through = _Hashing(below)
        with tarfile.open(fileobj=through, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK) as packed:
            for name in _names(folder):
                packed.add(folder / name, arcname=name, recursive=False, filter=anonymous)
        return Layer(file, through.hash.hexdigest(), through.size)


def write_archive(
    out: IO[bytes], name: str, layers: Sequence[Layer], config: Mapping[str, Any], *, present: Collection[Layer] = ()
) -> None:
    """Write the archive of an image called `name`, with its tag.

    config: configuration of the image: Env, Entrypoint, User …
    present: layers that the reader already has, which are listed but not written.
    """
    image = _json(
        {
            "architecture": _architecture(),
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _reference("application/vnd.oci.image.config.v1+json", image),
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": f"sha256:{layer.digest}",
                    "size": layer.size,
                }
                for layer in layers
            ],
        }
    )
    named = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    reference = _reference("application/vnd.oci.image.manifest.v1+json", manifest)
    entry = reference | {"platform": {"architecture": _architecture(), "os": "linux"}, "annotations": named}
    with tarfile.open(fileobj=out, mode="w|", bufsize=BLOCK) as packed:
        _add(packed, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(packed, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (image, manifest):
            _add(packed, f"blobs/sha256/{_digest(blob)}", blob)
        for layer in dict.fromkeys(layer for layer in layers if layer not in present):
            member = tarfile.TarInfo(f"blobs/sha256/{layer.digest}")
            member.size = layer.size
            with layer.file.open("rb") as content:
                packed.addfile(member, content)


def described(layer: Layer) -> dict[str, Any]:
    """Describe a layer as JSON values for `recalled`."""
    return asdict(layer) | {"file": layer.file.name}


def recalled(folder: Path, description: Mapping[str, Any]) -> Layer:
    """Return the layer with this description, whose file is in `folder`."""
    return Layer(folder / description["file"], description["digest"], description["size"])


def _names(folder: Path) -> list[str]:
    paths = []
    for at, folders, files in os.walk(folder):
        paths += [os.path.relpath(os.path.join(at, name), folder) for name in (*folders, *files)]  # noqa: PTH118
    return sorted(paths)


def _architecture() -> str:
    return ARCHITECTURES[platform.machine()]


def _reference(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{_digest(blob)}", "size": len(blob)}


def _digest(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _add(packed: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    packed.addfile(member, io.BytesIO(content))
