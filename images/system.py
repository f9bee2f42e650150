"""The lowest layer: Python and a few Debian packages, copied from the machine that builds the image.

The base of the Dockerfile has the same: the same Python version in /usr/local, and Debian's shell and tools.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PACKAGES = (
    *("base-files", "bash", "ca-certificates", "coreutils", "dash", "debianutils", "findutils", "grep", "gzip"),
    *(
        "hostname",
        "libc-bin",
        "libc6",
        "libgcc-s1",
        "libstdc++6",
        "netbase",
        "procps",
        "sed",
        "tar",
        "tzdata",
        "zlib1g",
    ),
)
UNUSED = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/lintian/")
# Folders that installation creates; they are not in the packages.
INSTALLED_FOLDERS = ("/etc/ssl/certs",)
MERGED = ("bin", "lib", "lib64", "sbin")
LIBRARIES = Path("usr/lib") / sysconfig.get_config_var("MULTIARCH")
PYTHON = Path("usr/local")
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
TESTS = ("test", "tests", "idle_test", "__pycache__", "site-packages", "config-*", "*.a")


class NotBuildable(Exception):
    """A part of the layer is not on this machine."""


def inputs(packages: Sequence[str]) -> list[str]:
    """Return the inputs of the layer, for its hash. Raises NotBuildable."""
    if lacking := absent(packages):
        raise NotBuildable(f"install these Debian packages: {' '.join(lacking)}")
    return [_versions(packages), sys.version, sys.base_prefix, platform.machine()]


def absent(packages: Sequence[str]) -> list[str]:
    """Return the packages of PACKAGES and `packages` that are not installed. Raises NotBuildable without dpkg."""
    installed = {line.split()[0] for line in _versions(packages).splitlines() if line.endswith(" installed")}
    return sorted({*PACKAGES, *packages} - installed)


def _versions(packages: Sequence[str]) -> str:
    if shutil.which("dpkg-query") is None:
        raise NotBuildable("the system in an image's archive is copied from a Debian machine, and this is not one")
    command = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${db:Status-Status}\n", *PACKAGES, *packages]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def fill(root: Path, packages: Sequence[str]) -> None:
    """Create the layer's files in an empty folder."""
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for name, mode in {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "proc": 0o755, "sys": 0o755}.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    for path in _files_of([*PACKAGES, *packages]):
        _copy(path, root)
    for folder in INSTALLED_FOLDERS:
        shutil.copytree(folder, root / folder.lstrip("/"), symlinks=False, dirs_exist_ok=True)
    _copy_python(root)
    _copy_libraries(root)
    subprocess.run(["/sbin/ldconfig", "-r", root], check=True)


def _files_of(packages: Iterable[str]) -> Iterator[Path]:
    listed = subprocess.run(["dpkg-query", "--listfiles", *packages], check=True, capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        # Other lines are empty lines between packages, and remarks about diverted files.
        path = Path(line)
        if line.startswith("/") and not line.startswith(UNUSED) and (path.is_symlink() or path.is_file()):
            yield path


def _copy(path: Path, root: Path) -> None:
    """Copy a file to its resolved folder: /bin is a link to /usr/bin on this machine and in the image."""
    target = root / (path.parent.resolve() / path.name).relative_to("/")
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)


def _copy_python(root: Path) -> None:
    """Copy Python, which finds its library relative to its own path."""
    prefix, own = Path(sys.base_prefix), root / PYTHON
    (own / "bin").mkdir(parents=True, exist_ok=True)
    (own / "lib").mkdir(parents=True, exist_ok=True)
    shutil.copy2((prefix / "bin" / VERSION).resolve(), own / "bin" / VERSION)
    for link in ("python3", "python"):
        (own / "bin" / link).symlink_to(VERSION)
    for library in (prefix / "lib").glob(f"lib{VERSION}.so*"):
        shutil.copy2(library, own / "lib" / library.name)
    shutil.copytree(prefix / "lib" / VERSION, own / "lib" / VERSION, ignore=shutil.ignore_patterns(*TESTS))
    (own / "lib" / VERSION / "site-packages").mkdir(exist_ok=True)
    compile_all(root, own / "lib" / VERSION)


def compile_all(root: Path, folder: Path) -> None:
    """Compile Python files so that they are valid for any file time, and contain their paths in the image."""
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    # Some packages contain templates that are not valid Python; importing those fails later.
    subprocess.run([*command, "-s", root, "-p", "/", folder], check=False, stdout=subprocess.DEVNULL)


def _copy_libraries(root: Path) -> None:
    """Copy the shared libraries that files of the layer need and that are not in it."""
    files = [str(path) for path in root.rglob("*") if path.is_file() and not path.is_symlink() and _is_elf(path)]
    listed = subprocess.run(["ldd", *files], check=False, capture_output=True, text=True).stdout
    needed = {line.split(" => ")[1].split()[0] for line in listed.splitlines() if " => /" in line}
    present = {path.name for path in root.rglob("*.so*")}
    for library in sorted(needed):
        if (name := Path(library).name) not in present:
            shutil.copy2(library, root / LIBRARIES / name)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
