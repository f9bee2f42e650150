"""The layers of an image, from what changes least to what changes most, each kept in a cache until its inputs change.

${XDG_CACHE_HOME:-~/.cache}/qwen35/images/<layer>-<hash of its inputs>.tar and .json

system          Python and Debian packages of this machine: of images with the same ones the same   system.py
dependencies    the lock's packages, by uv
own             this repository's packages and files, and the user
"""

import hashlib
import json
import os
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
from images.definition import HOME, REPOSITORY, Definition
from images.system import NotBuildable

# Of the repository, what its wheel is made of.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "operator", "trainer")
# Changes whenever a layer of the same inputs would be another.
FORMAT = "1"
LONGEST = 1800.0
"""Seconds that one waits for another build: some six times what all layers take."""


def layers(image: Definition) -> list[Layer]:
    """All of them, built where needed. Raises NotBuildable."""
    inputs = [*system.inputs(image.packages), *_hashes(SOURCES), *_hashes(image.files), repr(image)]
    with locked():
        own = _layer(f"{_short(image)}-own", inputs, lambda root: _fill_own(root, image), {HOME: image.user})
    return [*base_layers(image), own]


def base_layers(image: Definition) -> list[Layer]:
    """Those that change seldom, built where needed. Raises NotBuildable."""
    lock = REPOSITORY / image.requirements
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


def _short(image: Definition) -> str:
    return image.name.rpartition("/")[2]


def _layer(
    name: str, inputs: Iterable[str], fill: Callable[[Path], None], owners: Mapping[str, int] | None = None
) -> Layer:
    """From the cache, or made anew in the place of all of its name."""
    key = hashlib.sha256("\0".join([FORMAT, *inputs]).encode()).hexdigest()[:16]
    about = cache() / f"{name}-{key}.json"
    if about.exists():
        return recalled(cache(), json.loads(about.read_text()))
    print(f"making layer {name}", file=sys.stderr, flush=True)
    for outdated in [*cache().glob(f"{name}-{'[0-9a-f]' * 16}.*")]:
        outdated.unlink()
    # In the cache: uv links files that are on the same disk as its own cache. What was cut off last time goes first.
    root = cache() / f"{name}.making"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    fill(root)
    layer = write_layer(root, about.with_suffix(".tar"), owners or {})
    shutil.rmtree(root)
    aside = about.with_suffix(".writing")
    aside.write_text(json.dumps(described(layer)))
    aside.rename(about)
    return layer


def _install(root: Path, *what: str | Path) -> None:
    """Installs as Python in /usr/local of the image would, without dependencies: the lock names them all."""
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
        # Another file in its place: this one may be linked into uv's cache.
        mode = script.stat().st_mode
        script.unlink()
        script.write_bytes(f"#!/{system.PYTHON / 'bin' / system.VERSION}\n".encode() + rest)
        script.chmod(mode)


def _fill_own(root: Path, image: Definition) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([_uv(), "build", "--quiet", "--wheel", "--out-dir", folder, REPOSITORY], check=True)
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
    """The one of the virtual environment that this runs in, or any."""
    own = Path(sys.executable).with_name("uv")
    return str(own) if own.exists() else "uv"


def cache() -> Path:
    """Where layers are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qwen35" / "images"


@contextmanager
def locked() -> Iterator[None]:
    """Nobody else changes the cache. Raises NotBuildable when somebody does for LONGEST."""
    cache().mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache() / "lock", timeout=LONGEST)
    try:
        lock.acquire()
    except Timeout:
        raise NotBuildable(f"{lock.lock_file} is held by another build for {LONGEST:g} s now: end that one") from None
    try:
        yield
    finally:
        lock.release()
