"""The layers of an image, in increasing order of change, each cached until its inputs change.

${XDG_CACHE_HOME:-~/.cache}/qwen35/images/<layer>-<hash of its inputs>.tar and .json

system          Python and Debian packages of this machine; shared by images with the same packages   system.py
dependencies    the packages of the lock file, by uv
own             this repository's packages and files, and the user
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from images import system
from images.archive import Layer, described, recalled, write_layer
from images.definition import BASE, HOME, MACHINES, Definition
from images.repository import REPOSITORY
from images.system import NotBuildable

# Parts of the repository from which its wheel is built.
SOURCES = ("requirements/build.txt", "pyproject.toml", "README.md", "LICENSE", "operator", "trainer")
# Increased whenever the same inputs give a different layer.
FORMAT = "1"
MAX_LOCK_WAIT_SECONDS = 1800.0
"""Maximum wait for another build: about six times the time of all layers."""


def layers(image: Definition) -> list[Layer]:
    """Return all layers, and build those that are not in the cache. Raises NotBuildable."""
    base = base_layers(image)
    inputs = [*system.inputs(image.packages), *_hashes(SOURCES), *_hashes(image.files), repr(image)]
    with locked():
        own = _layer(f"{_short(image)}-own", inputs, lambda root: _fill_own(root, image), {HOME: image.user})
    return [*base, own]


def base_layers(image: Definition) -> list[Layer]:
    """Return the layers that change rarely, and build those that are not in the cache. Raises NotBuildable."""
    if image.not_archived or image.base != BASE:
        reason = image.not_archived or f"it is based on {image.base}"
        raise NotBuildable(f"{image.name} needs a builder with a registry, because {reason}; use its Dockerfile")
    lock = REPOSITORY / _lock(image)
    inputs, named = system.inputs(image.packages), "-".join(["system", *image.packages])
    with locked():
        return [
            _layer(named, inputs, lambda root: system.fill(root, image.packages)),
            _layer(
                f"{_short(image)}-dependencies",
                [*inputs, lock.read_text()],
                lambda root: _install(root, "--requirement", lock),
            ),
        ]


def _lock(image: Definition) -> str:
    """Return the path of this machine's lock. Raises NotBuildable."""
    machine = platform.machine()
    for architecture, lock in image.locks.items():
        if MACHINES[architecture] == machine:
            return lock
    raise NotBuildable(f"{image.name} is for {', '.join(image.architectures)}, and this machine is {machine}")


BUILT_WITH = ("--build-constraints", REPOSITORY / "requirements" / "build.txt", "--require-build-hashes")
"""The options of uv by which it builds with the locked versions, and compares their hashes."""


def _short(image: Definition) -> str:
    return image.name.rpartition("/")[2]


def _layer(
    name: str, inputs: Iterable[str], fill: Callable[[Path], None], owners: Mapping[str, int] | None = None
) -> Layer:
    """Return a layer from the cache, or build it and delete older layers of the same name."""
    key = hashlib.sha256("\0".join([FORMAT, *inputs]).encode()).hexdigest()[:16]
    description_file = cache() / f"{name}-{key}.json"
    if description_file.exists():
        return recalled(cache(), json.loads(description_file.read_text()))
    print(f"making layer {name}", file=sys.stderr, flush=True)
    for outdated in [*cache().glob(f"{name}-{'[0-9a-f]' * 16}.*")]:
        outdated.unlink()
    # Built in the cache, because uv hard-links files on the disk of its cache. A folder of an interrupted build is deleted.
    root = cache() / f"{name}.making"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    fill(root)
    layer = write_layer(root, description_file.with_suffix(".tar"), owners or {})
    shutil.rmtree(root)
    temporary = description_file.with_suffix(".writing")
    temporary.write_text(json.dumps(described(layer)))
    temporary.rename(description_file)
    return layer


def _install(root: Path, *what: str | Path) -> None:
    """Install for the Python in /usr/local of the image, without dependencies: the lock file lists all of them."""
    prefix = root / system.PYTHON
    command = [_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--prefix", prefix, *what]
    subprocess.run([str(word) for word in command], check=True, cwd=REPOSITORY)
    for script in (prefix / "bin").iterdir():
        _point_to_own_python(script)
    system.compile_all(root, prefix / "lib" / system.VERSION / "site-packages")


def _point_to_own_python(script: Path) -> None:
    content = script.read_bytes()
    first, _, rest = content.partition(b"\n")
    if first.startswith(b"#!") and b"python" in first:
        # A new file replaces the script, which may be a hard link into uv's cache.
        mode = script.stat().st_mode
        script.unlink()
        script.write_bytes(f"#!/{system.PYTHON / 'bin' / system.VERSION}\n".encode() + rest)
        script.chmod(mode)


def _fill_own(root: Path, image: Definition) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([_uv(), "build", "--quiet", "--wheel", "--out-dir", folder, *BUILT_WITH, REPOSITORY], check=True)
        _install(root, *Path(folder).glob("*.whl"))
    for here, there in image.files.items():
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / here, root / there.lstrip("/"), ignore=skipped)
    home = root / HOME.lstrip("/")
    home.mkdir(parents=True)
    (root / "etc").mkdir()
    for file, line in {
        "passwd": f"root:x:0:0:root:/root:/bin/bash\nqwen35:x:{image.user}:{image.user}::{HOME}:/bin/bash\n",
        "group": f"root:x:0:\nqwen35:x:{image.user}:\n",
    }.items():
        (root / "etc" / file).write_text(line)


def _hashes(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        path = REPOSITORY / part
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                yield f"{file.relative_to(REPOSITORY)} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _uv() -> str:
    """Return the uv of the running virtual environment, or any other."""
    own = Path(sys.executable).with_name("uv")
    return str(own) if own.exists() else "uv"


def cache() -> Path:
    """Return the folder of the cached layers."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qwen35" / "images"


@contextmanager
def locked() -> Iterator[None]:
    """Lock the cache against other builds. Raises NotBuildable after MAX_LOCK_WAIT_SECONDS."""
    cache().mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache() / "lock", timeout=MAX_LOCK_WAIT_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise NotBuildable(
            f"{lock.lock_file} has been held by another build for {MAX_LOCK_WAIT_SECONDS:g} s: end that build"
        ) from None
    try:
        yield
    finally:
        lock.release()
