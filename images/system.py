"""The lowest layer: Python and a few Debian packages, copied from the machine that builds it.

What the base of the build file has too: the same Python version in /usr/local, and Debian's shell and tools.
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
# Not in the packages: made when they were installed.
MADE = ("/etc/ssl/certs",)
MERGED = ("bin", "lib", "lib64", "sbin")
LIBRARIES = Path("usr/lib") / sysconfig.get_config_var("MULTIARCH")
PYTHON = Path("usr/local")
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
TESTS = ("test", "tests", "idle_test", "__pycache__", "site-packages", "config-*", "*.a")


class NotBuildable(Exception):
    """What the layer is made of is not on this machine."""


def inputs(packages: Sequence[str]) -> list[str]:
    """What the layer depends on. Raises NotBuildable."""
    if lacking := absent(packages):
        raise NotBuildable(f"install these Debian packages: {' '.join(lacking)}")
    return [_versions(packages), sys.version, sys.base_prefix, platform.machine()]


def absent(packages: Sequence[str]) -> list[str]:
    """What of PACKAGES and of these is not installed. Raises NotBuildable where nothing of it can be."""
    installed = {line.split()[0] for line in _versions(packages).splitlines() if line.endswith(" installed")}
    return sorted({*PACKAGES, *packages} - installed)


def _versions(packages: Sequence[str]) -> str:
    if shutil.which("dpkg-query") is None:
        raise NotBuildable("the archive of an image takes its system from a Debian machine, and this is none")
    command = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${db:Status-Status}\n", *PACKAGES, *packages]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def fill(root: Path, packages: Sequence[str]) -> None:
    """Makes the layer's files in an empty folder."""
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for name, mode in {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "proc": 0o755, "sys": 0o755}.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    for path in _files_of([*PACKAGES, *packages]):
        _copy(path, root)
    for folder in MADE:
        shutil.copytree(folder, root / folder.lstrip("/"), symlinks=False, dirs_exist_ok=True)
    _copy_python(root)
    _copy_libraries(root)
    subprocess.run(["/sbin/ldconfig", "-r", root], check=True)


def _files_of(packages: Iterable[str]) -> Iterator[Path]:
    listed = subprocess.run(["dpkg-query", "--listfiles", *packages], check=True, capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        # Between packages are empty lines, and remarks about diverted files.
        path = Path(line)
        if line.startswith("/") and not line.startswith(UNUSED) and (path.is_symlink() or path.is_file()):
            yield path


def _copy(path: Path, root: Path) -> None:
    """Where the folder really is: /bin is a link to /usr/bin, here as there."""
    target = root / (path.parent.resolve() / path.name).relative_to("/")
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)


def _copy_python(root: Path) -> None:
    """Python finds its library beside itself, wherever that is."""
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
    """Compiles Python's files so that they are current whatever the time in the archive, and know their place in it."""
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    # Some packages ship templates that are no Python; who imports them learns of it.
    subprocess.run([*command, "-s", root, "-p", "/", folder], check=False, stdout=subprocess.DEVNULL)


def _copy_libraries(root: Path) -> None:
    """Shared libraries that something of the layer needs and nothing of it brought."""
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
