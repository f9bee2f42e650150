"""Resolves the locks of images that have their own versions: one for each architecture, with hashes and without index hosts.

    pyproject.toml: dependencies, extras of image.yaml ─┐
    versions.yaml: the image's versions ────────────────┼─► uv pip compile ─► requirements/<image>-<architecture>.txt
    images/<image>/uv.toml ─────────────────────────────┘                 └─► the lock of packages that the image builds

python -m images.locks            writes all of them; versions already pinned stay unless the inputs exclude them
python -m images.locks --check    fails when one is not current, without a resolver or a network

The first line of a lock has a digest of its inputs and of its other lines, so that --check takes no time.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from images.definition import MACHINES, Architecture, Definition, definition, names
from images.repository import REPOSITORY
from images.versions import versions

PLATFORM: Final = "manylinux_2_35"
"""The C library of the images: Debian 12 has 2.36 and the CANN images' Ubuntu 22.04 has 2.35."""
PIN: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^ ;]+)", re.MULTILINE)


def locked_images() -> list[str]:
    """Return the images whose locks this module writes."""
    return [name for name in names() if definition(name).extras]


def requirements(image: str) -> list[str]:
    """Return what the lock of an image must contain: requirements of pyproject.toml, and the image's versions."""
    project = _pyproject()["project"]
    wanted = [*project["dependencies"]]
    for extra in definition(image).extras:
        wanted += project["optional-dependencies"][extra]
    return wanted + [f"{name}=={version}" for name, version in versions().of(image, "wheel", "distribution").items()]


def pins(lock: str) -> dict[str, str]:
    """Return the versions in the text of a lock, by normalised name."""
    return {canonicalize_name(match["name"]): match["version"] for match in PIN.finditer(lock)}


def digest(image: str, lines: str) -> str:
    """Return the digest of a lock's inputs and of its lines after the first."""
    settings = _settings_file(image).read_text()
    inputs = [PLATFORM, versions().of(image)["python"], *requirements(image), *versions().omitted_from(image), settings]
    return hashlib.sha256("\0".join([*inputs, lines]).encode()).hexdigest()[:16]


def is_current(image: str, lock: Path) -> bool:
    """Whether a lock was written by this module from the present inputs and not changed since."""
    if not lock.exists():
        return False
    first, _, lines = lock.read_text().partition("\n")
    return first == _head(image, lines)


def write(image: str) -> None:
    """Resolve and write all locks of an image. Raises CalledProcessError when a set of requirements has no solution."""
    image_definition = definition(image)
    built: dict[str, None] = {}
    for architecture, path in image_definition.locks.items():
        lock = REPOSITORY / path
        resolved = list(blocks(_resolve(image, architecture, lock)))
        compiled = set(versions().of(image, "distribution"))
        _write(image, lock, [block for block in resolved if not pins(block).keys() & compiled])
        built |= dict.fromkeys(block for block in resolved if pins(block).keys() & compiled)
    if image_definition.built:
        # Source distributions are the same for all architectures. The table lists them in the order of their compilation.
        order = list(versions().of(image, "distribution"))
        ordered = sorted(built, key=lambda block: order.index(next(iter(pins(block)))))
        _write(image, REPOSITORY / image_definition.built, ordered)


def files(image_definition: Definition) -> list[str]:
    """Return the paths of all locks of an image."""
    return [*image_definition.locks.values(), *([image_definition.built] if image_definition.built else [])]


def _resolve(image: str, architecture: Architecture, present: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        wanted, output = Path(folder) / "wanted.in", Path(folder) / "lock.txt"
        wanted.write_text("\n".join(requirements(image)) + "\n")
        if present.exists():
            built = definition(image).built
            pinned = [present, *([REPOSITORY / built] if built else [])]
            output.write_text("".join(lock.read_text() for lock in pinned if lock.exists()))
        command = ["uv", "pip", "compile", wanted, "--output-file", output, "--quiet", "--python", sys.executable]
        command += ["--config-file", _settings_file(image), "--python-version", versions().of(image)["python"]]
        command += ["--python-platform", f"{MACHINES[architecture]}-{PLATFORM}", "--generate-hashes"]
        command += ["--no-emit-index-url", "--no-header", "--no-annotate"]
        for name in versions().omitted_from(image):
            command += ["--no-emit-package", name]
        environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, env=environment)
        return output.read_text()


def blocks(lock: str) -> Iterator[str]:
    """Yield each requirement of a lock with its hashes."""
    block: list[str] = []
    for line in lock.splitlines(keepends=True):
        if block and not line.startswith(" "):
            yield "".join(block)
            block = []
        if not line.startswith("#"):
            block.append(line)
    if block:
        yield "".join(block)


def _write(image: str, lock: Path, content: Sequence[str]) -> None:
    lines = "".join(content)
    lock.write_text(f"{_head(image, lines)}\n{lines}")


def _head(image: str, lines: str) -> str:
    return f"# For images/{image}, by `make generate`. Inputs and lines: {digest(image, lines)}"


def _settings_file(image: str) -> Path:
    return REPOSITORY / "images" / image / "uv.toml"


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def main(*options: str) -> int:
    """Write or check all locks. Returns the number of those that are not current."""
    stale = 0
    for image in locked_images():
        if "--check" not in options:
            write(image)
            continue
        for path in files(definition(image)):
            if not is_current(image, REPOSITORY / path):
                print(f"{path} is not current: run make generate", file=sys.stderr)
                stale += 1
    return stale


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
