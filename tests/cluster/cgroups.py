"""The node's part of the machine's control groups: what its containers run in."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def create(name: str, *, for_groups: bool = True) -> None:
    """A group of this name in every hierarchy; kubelet wants its root to be there.

    for_groups: whether it will have groups within it; cgroup v2 then lets it have no processes of its own.
    """
    for hierarchy in hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        if (shares := group / "cpu.shares").exists():
            # As much of a busy machine as kubelet reckons with; by default a whole group gets what one process gets.
            shares.write_text(str(1024 * (os.cpu_count() or 1)))
        controllers = hierarchy / "cgroup.controllers"
        if controllers.exists():
            every = " ".join(f"+{controller}" for controller in controllers.read_text().split())
            (hierarchy / "cgroup.subtree_control").write_text(every)
            if for_groups:
                (group / "cgroup.subtree_control").write_text(every)


def remove(name: str, *, seconds: float = 10) -> None:
    """Ends all that runs in the groups of this name, and removes them. Raises OSError when that takes longer."""
    until = time.monotonic() + seconds
    for hierarchy in hierarchies():
        while (hierarchy / name).is_dir():
            try:
                _remove(hierarchy / name)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _remove(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        for pid in Path(folder, "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        Path(folder).rmdir()


def hierarchies() -> list[Path]:
    """One of cgroup v2, or one per controller of v1; those that can be written."""
    places = [ROOT] if (ROOT / "cgroup.procs").exists() else [path for path in ROOT.iterdir() if not path.is_symlink()]
    return [place for place in places if os.access(place / "cgroup.procs", os.W_OK)]
