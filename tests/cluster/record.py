"""A record of everything that a cluster created on this machine, in a file that outlives the process that wrote it.

    /run/qwen35-cluster/<name>.json     locked by the process that runs the cluster, removed by it at the end

A record that is not locked belongs to a process that was killed. The next process removes what it lists:

    processes           have MARK=<name> in their environment, or are in the control group
    control group       named by the record
    folder              named by the record: images, volumes, logs, etcd
    mounts, devices,    are in namespaces that end with the processes, see namespaces.py
    packet filter rules
"""

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tests.cluster import cgroups

FOLDER = Path("/run/qwen35-cluster")
MARK = "QWEN35_CLUSTER"
END_SECONDS = 600.0
"""For who runs a cluster to end it: perhaps it still builds images, and it deletes gigabytes."""
KILL_SECONDS = 30.0
"""For killed processes to be gone: one that waits for a disk stays until that answers."""


@dataclass(frozen=True)
class Record:
    name: str
    pid: int
    """Process id of the owner."""
    folder: str
    ready: bool = False

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.json"

    @property
    def cgroup(self) -> str:
        return f"qwen35-{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of the cluster."""
        return {MARK: self.name}

    def write(self) -> None:
        # Not replaced by another file: the lock is on this one.
        with self.file.open("r+") as file:
            text = json.dumps(asdict(self))
            file.write(text)
            file.truncate(len(text))


class Taken(Exception):
    """A cluster of this name runs."""


class NotRemoved(Taken):
    """Something of a cluster stays; says what and why. Its record stays too: the next start tries again."""


@contextmanager
def recorded(name: str) -> Iterator[Record]:
    """Keeps the record of a cluster in a new folder; at the end, removes all that it names. Raises Taken, NotRemoved."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.json").open("a+") as file:
        if not _lock(file):
            raise Taken(f"a cluster called {name} runs already: `python -m tests.cluster down` ends the one of `up`")
        record = Record(name, os.getpid(), tempfile.mkdtemp(prefix=f"qwen35-{name}-"))
        record.write()
        try:
            yield record
        finally:
            _remove(record)


def find(name: str) -> Record | None:
    """Read the record of this name, of any process."""
    with suppress(FileNotFoundError, json.JSONDecodeError):
        return Record(**json.loads((FOLDER / f"{name}.json").read_text()))
    return None


def remove_leftovers() -> list[str]:
    """Removes what killed processes left, and names those clusters. Raises NotRemoved once it has tried all."""
    removed, problems = [], []
    for path in FOLDER.glob("*.json") if FOLDER.is_dir() else []:
        with suppress(FileNotFoundError), path.open("r+") as file:
            if not _lock(file):
                continue
            if record := find(path.stem):
                try:
                    _remove(record)
                    removed.append(record.name)
                except NotRemoved as problem:
                    problems.append(str(problem))
            else:
                # Killed between the two lines that make a record.
                path.unlink(missing_ok=True)
    if problems:
        raise NotRemoved("; ".join(problems))
    return removed


def end(name: str, *, seconds: float = END_SECONDS) -> bool:
    """Request that the process that runs this cluster ends, and waits until it has; False when there is none.

    Raises NotRemoved.
    """
    record = find(name)
    if record is None:
        return False
    with record.file.open("r+") as file:
        if not _lock(file):
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGTERM)
            until = time.monotonic() + seconds
            while not _lock(file):
                if time.monotonic() > until:
                    remaining = _named([record.pid, *_marked(name)])
                    fix = f"Kill {record.pid}: the next start removes what it leaves"
                    raise NotRemoved(f"{seconds:g} s after SIGTERM the cluster {name} still has {remaining}. {fix}")
                time.sleep(0.1)
    remove_leftovers()
    return True


def _remove(record: Record) -> None:
    """All that the record names, then the record. Raises NotRemoved."""
    until = time.monotonic() + KILL_SECONDS
    while pids := _marked(record.name):
        if time.monotonic() > until:
            raise NotRemoved(f"{KILL_SECONDS:g} s after SIGKILL the cluster {record.name} still has {_named(pids)}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    try:
        cgroups.remove(record.cgroup)
    except OSError as problem:
        raise NotRemoved(f"the control group of the cluster {record.name} stays: {problem}") from problem
    problems: list[str] = []
    shutil.rmtree(record.folder, onexc=lambda _call, _path, problem: problems.append(str(problem)))
    if Path(record.folder).exists():
        raise NotRemoved(f"the folder of the cluster {record.name}, {record.folder}, stays: {'; '.join(problems[:3])}")
    # Last: until here, somebody else can do it again.
    record.file.unlink(missing_ok=True)


def _marked(name: str) -> list[int]:
    """Processes with the cluster's mark. A zombie has no environment."""
    marked_pids, mark = [], f"{MARK}={name}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    marked_pids.append(int(folder.name))
    return marked_pids


def _named(pids: Iterable[int]) -> str:
    """Those that still run, as in `kubelet (1234)`."""
    names = []
    for pid in pids:
        with suppress(OSError):
            names.append(f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({pid})")
    return ", ".join(names)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
