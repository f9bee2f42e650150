"""The fence (docs/design/fence.md) keeps an attempt that was replaced (a zombie) from changing the folders of its run.

An epoch is a period in which one attempt owns a folder. All attempts of a run write into the same folders:

    folder/owner.json                     the owner: epoch, attempt, cluster, host. Read again before every write
    folder/.epoch-000007-1f2e3d4c/        the workspace of epoch 7, in which its attempt creates everything that it writes

    attempt 1, epoch 6                    attempt 2                                 attempt 1, which still runs
    ──────────────────                    ─────────                                 ───────────────────────────
    make .epoch-000006-…/update-000020
                                          create .epoch-000007-…                    check: it owns the folder ─┐
                                          newer epochs? none                                                   │
                                          delete .epoch-000006-…                                               │
                                          rename owner.json into place                                         │
                                          delete .epoch-000006-… again                                         ▼
                                          choose the checkpoint                     rename out of .epoch-000006-…: fails
                                          rename update-000020 into place           check: Superseded, the attempt ends

An attempt publishes a file or a folder by renaming it out of the workspace, and deletes one by renaming it into the
workspace. Before each rename, the attempt checks the owner. Between the check and the rename, the attempt may still
stop for minutes, when its node stalls or is cut off. The rename then fails, because the next attempt has deleted the
workspace before it became the owner. Files that stay open for appending get a new inode in every epoch, so that an
earlier attempt appends to a file without a name.

Two attempts that begin at the same time are ordered by (epoch, attempt). Each creates its workspace before it lists the
workspaces of others, so at least one of the two sees the other. The attempt with the lower order gives up, or finds its
workspace deleted when it renames owner.json.

The fence relies on guarantees of local file systems, NFS (v3 and v4, mounted without `nocto`), CephFS, Lustre and
GPFS: a folder is created once; a rename is atomic, and fails if its source or the folder of its target is gone; and a
process that opens a file or lists a folder sees all operations that other processes have completed. The fence needs
no locks, no links and no clocks. It does not work on object stores that are mounted as a file system, which rename a
folder file by file.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path

from qwen35_trainer.atomic_files import FolderWriter, sync
from qwen35_trainer.failure_reasons import FailureReason

OWNER_FILE = "owner.json"
WORKSPACE_PREFIX = ".epoch-"
REVOKE_SECONDS = 20.0
"""Maximum time, in seconds, to delete the workspaces of earlier attempts, which may still write into them. After this
time, `take` raises Superseded."""
_REVOKE_PAUSE_SECONDS = 0.05
_WORKSPACE_NAME = re.compile(r"\.epoch-(\d+)-([^.]+)")
_OPEN_DELETED_PREFIX = ".nfs"
"""Beginning of the name that an NFS client gives to a deleted file while a process of the same machine still has
the file open."""


class FolderRefused(ValueError):
    """A folder cannot be used for this run. The message contains the reason and what to do."""

    failure = FailureReason.FOLDER_REFUSED


class Superseded(RuntimeError):
    """Another attempt or run owns the folder, or is taking it over. This attempt must end without writing anything more.

    by_later_attempt: whether the owner is an attempt of the same training that the operator has started after this one.
    The operator then does not wait for this attempt.
    """

    failure = FailureReason.SUPERSEDED

    def __init__(self, message: str, *, by_later_attempt: bool = False) -> None:
        super().__init__(message)
        self.by_later_attempt = by_later_attempt


@dataclass(frozen=True)
class Owner:
    """The record of the attempt that owns a folder: the content of owner.json."""

    run: str
    """Identity of the run. All attempts of the run have the same one."""
    attempt: str
    """Random name of the attempt. Each start of the run has a new one."""
    host: str
    output: str
    """Path of the run's output folder on `host`."""
    start: str = ""
    """The checkpoint from which the attempt began: the name of the checkpoint if it is in this folder,
    otherwise its path.

    Empty if the attempt began from the model, and in records of releases without this field. Later checkpoints in the
    folder, which another attempt left there, are not part of this attempt's lineage.
    """
    training: str = ""
    """uid of the Qwen35Training object. Empty outside of a cluster, and in records of earlier releases."""
    number: int = 0
    """Number that the operator gave to the attempt. 0 outside of a cluster, and in records of earlier releases."""
    cluster: str = ""
    """Name of the RayCluster in which the attempt runs. Empty outside of a cluster, and in records of earlier releases.

    If a queue evicts an attempt, the attempt continues later in another RayCluster, with the same `number`.
    """
    epoch: int = 0
    """Number of the epoch. It is higher than the epochs of all earlier owners. 0 in records of earlier releases."""

    def __str__(self) -> str:
        number = f"attempt {self.number}, " if self.number else ""
        return f"{self.run} ({number}{self.host}:{self.output})"

    def is_later_than(self, other: Owner) -> bool:
        """Return whether this attempt belongs to the same training as `other`, and the operator started this one later.

        Always False outside of a cluster.
        """
        return self.training == other.training != "" and self.number > other.number


def read_owner(folder: Path) -> Owner | None:
    """Return the owner of a folder, from owner.json; None if the file does not exist.

    A new folder and a folder from an old release have no such file. Raises FolderRefused if owner.json is damaged, and
    OSError if the file cannot be read, which may be temporary.
    """
    path = folder / OWNER_FILE
    try:
        record = json.loads(path.read_text())
        return Owner(
            run=str(record["run"]),
            attempt=str(record["attempt"]),
            host=str(record["host"]),
            output=str(record["output"]),
            # Earlier releases wrote none of these.
            start=str(record.get("start", "")),
            training=str(record.get("training", "")),
            number=int(record.get("number", 0)),
            cluster=str(record.get("cluster", "")),
            epoch=int(record.get("epoch", 0)),
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise FolderRefused(
            f"{path} does not say whose folder this is ({type(error).__name__}). Delete it if no run writes there "
            "any more, then continue with --resume auto"
        ) from error


@dataclass(frozen=True)
class Epoch(FolderWriter):
    """Writes files into a folder while one attempt owns the folder. `take` creates an epoch.

    A copy of this object in another process belongs to the same epoch. The methods that write raise Superseded once
    another attempt owns the folder, FolderRefused if owner.json is damaged, and OSError if the disk fails.
    """

    owner: Owner

    @property
    def workspace(self) -> Path:
        """The folder in which the attempt creates files before it publishes them.

        The next attempt deletes this folder.
        """
        return self.folder / f"{WORKSPACE_PREFIX}{self.owner.epoch:06d}-{self.owner.attempt}"

    def check(self) -> None:
        """Raise Superseded if another attempt owns the folder.

        If owner.json or the whole folder was deleted, this method writes owner.json again. If the folder exists without
        owner.json and without the workspace, another attempt has owned it and ended, so Superseded is raised.
        """
        current = read_owner(self.folder)
        if current is None:
            self._restore()
        elif current.attempt != self.owner.attempt:
            raise _superseded(self.folder, current, self.owner)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Context manager: replace an OSError of the body by Superseded if another attempt has caused it.

        That is the case if another attempt owns the folder, or has deleted the workspace. Any other OSError stays
        as it is.
        """
        try:
            yield
        except OSError as error:
            current = read_owner(self.folder)
            if current is not None and current.attempt != self.owner.attempt:
                raise _superseded(self.folder, current, self.owner) from error
            if isinstance(error, FileNotFoundError) and not self.workspace.exists() and self.folder.exists():
                raise Superseded(f"{self.folder} is being taken over by another attempt. {_ADVICE}") from error
            raise

    def place(self, name: str) -> Path:
        """Return a path in the workspace, at which the caller creates a file or folder before `publish` renames it.

        Creates the workspace if it is missing, and nothing at the returned path. Raises Superseded if another attempt
        owns the folder, FolderRefused if owner.json is damaged, and OSError if the disk fails.
        """
        self.check()
        # Somebody may have deleted it by hand. After another attempt has, `publish` notices that at its check.
        self.workspace.mkdir(exist_ok=True)
        return self.workspace / name

    def publish(self, made: Path, path: Path) -> None:
        self.check()
        with self.guarded():
            made.replace(path)

    def _set_aside(self, path: Path) -> Path | None:
        aside = self.place(f"{path.name}.{secrets.token_hex(4)}.deleted")
        with self.guarded():
            try:
                path.rename(aside)
            except FileNotFoundError:
                if path.exists():  # then the workspace is missing
                    raise
                return None
        return aside

    def open_appending(self, path: Path) -> FileIO:
        """Replace a file by a copy, and open the copy for reading and appending, without a buffer.

        An earlier attempt that has the old file open then appends to a file without a name. If the file does not exist,
        an empty one is created.
        """
        copy = self.place(path.name)
        with self.guarded():
            copy.unlink(missing_ok=True)
            try:
                if path.exists():
                    shutil.copyfile(path, copy)
                # Opened before the rename: after it, a later attempt may have replaced the file again.
                file = copy.open("a+b", buffering=0)
            except OSError:
                copy.unlink(missing_ok=True)
                raise
        try:
            self.publish(copy, path)
        except BaseException:
            file.close()
            raise
        return file

    def clean(self) -> None:
        """Delete the workspaces of earlier epochs. Errors are ignored, because a workspace that stays does no harm."""
        with contextlib.suppress(OSError):
            for path in _workspaces(self.folder, before=self._order):
                shutil.rmtree(path, ignore_errors=True)

    def end(self, *, keep_record: bool = True) -> None:
        """End the epoch: delete the workspace and, unless `keep_record`, owner.json.

        The owner.json of another attempt is never deleted. Errors are ignored.
        """
        with contextlib.suppress(OSError, FolderRefused, Superseded):
            if not keep_record and read_owner(self.folder) == self.owner:
                self.delete(self.folder / OWNER_FILE)
        # Renamed first, as by `_revoke`: a thread of this attempt may still write there, and must not publish a part of it.
        aside = self.workspace.with_name(f"{self.workspace.name}.{secrets.token_hex(4)}.revoked")
        with contextlib.suppress(OSError):
            self.workspace.rename(aside)
        for folder in (aside, self.workspace):
            shutil.rmtree(folder, ignore_errors=True)

    def record_start(self, start: str) -> Epoch:
        """Write owner.json again with `start` in its field of this name, and return the epoch of that record."""
        self.check()
        epoch = replace(self, owner=replace(self.owner, start=start))
        epoch._write_record()
        return epoch

    @property
    def _order(self) -> tuple[int, str]:
        return self.owner.epoch, self.owner.attempt

    def _restore(self) -> None:
        """Write owner.json again, which somebody has deleted.

        Raises Superseded if the folder exists and the workspace does not, because another attempt has then owned the
        folder and ended.
        """
        if self.folder.exists() and not self.workspace.exists():
            raise Superseded(f"{self.folder} was taken over by another attempt, which has ended. {_ADVICE}")
        self.workspace.mkdir(parents=True, exist_ok=True)
        self._write_record()

    def _write_record(self) -> None:
        made = self.workspace / OWNER_FILE
        with self.guarded():
            made.write_text(json.dumps(asdict(self.owner), indent=2) + "\n")
            sync(made)
            made.replace(self.folder / OWNER_FILE)
            sync(self.folder)


_ADVICE = "Name another folder in spec.checkpoint.storage.path to continue next to that run"


def take(folder: Path, owner: Owner, seen: Owner | None) -> Epoch:
    """Begin an epoch in which `owner` owns the folder, and return the epoch. Creates the folder if it does not exist.

    Attempts that owned the folder before can publish nothing after this.

    owner: the record of this attempt; this function sets its field `epoch` to the number of the new epoch. seen: the
    owner that the caller read before this call; None if the folder had no owner then.

    Raises Superseded if the present owner is an attempt that the operator has started after this one; if the present
    owner is neither `seen` nor an earlier attempt of the same training; if another attempt takes the folder at the same
    time; or if an earlier attempt writes into its workspace faster than the workspace can be deleted. Raises
    FolderRefused if owner.json is damaged, and OSError if the disk fails.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    epochs = [order[0] for order, _ in _listed(folder)]
    current = read_owner(folder)
    number = 1 + max([*epochs, 0 if current is None else current.epoch])
    epoch = Epoch(folder, replace(owner, epoch=number))
    epoch.workspace.mkdir(exist_ok=True)  # its name is random: if it exists, an answer of the file server was lost
    try:
        _check_newest(epoch, seen)
        _revoke(epoch)
        epoch._write_record()
        # Again: until the record was written, an earlier attempt owned the folder, and may have created its workspace again.
        _revoke(epoch)
    except BaseException:
        shutil.rmtree(epoch.workspace, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # another attempt has written there meanwhile
                folder.rmdir()
        raise
    return epoch


def _check_newest(epoch: Epoch, seen: Owner | None) -> None:
    """Raise Superseded if the owner has changed since `seen` was read, or if a later attempt takes the folder now.

    A later attempt is one with a higher (epoch, attempt). An owner that is an earlier attempt of the same training is
    accepted, because it is taken over.
    """
    current, own = read_owner(epoch.folder), epoch.owner
    if current is not None and not own.is_later_than(current) and (current != seen or current.is_later_than(own)):
        raise _superseded(epoch.folder, current, own)
    newer = [path.name for order, path in _listed(epoch.folder) if order > epoch._order]
    if newer or (current is not None and current.epoch >= own.epoch):
        raise Superseded(f"another attempt takes over {epoch.folder} at the same time. {_ADVICE}")


def _superseded(folder: Path, current: Owner, own: Owner) -> Superseded:
    message = f"{folder} was taken over by {current}. {_ADVICE}"
    return Superseded(message, by_later_attempt=current.is_later_than(own))


def _listed(folder: Path) -> list[tuple[tuple[int, str], Path]]:
    """Return ((epoch, attempt), path) of each workspace in a folder. The folder is read again at each call."""
    matches = [(_WORKSPACE_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return [((int(match[1]), match[2]), path) for match, path in matches if match is not None]


def _workspaces(folder: Path, *, before: tuple[int, str]) -> list[Path]:
    """Return the workspaces of earlier epochs, and the unfinished checkpoints of releases that had no epochs.

    before: the (epoch, attempt) below which an epoch is earlier.
    """
    earlier = [path for order, path in _listed(folder) if order < before]
    return [*earlier, *folder.glob(f"{WORKSPACE_PREFIX}*.revoked"), *folder.glob(".update-*")]


def _revoke(epoch: Epoch) -> None:
    """Delete the workspaces of earlier epochs. Their attempts can then rename nothing out of them or into them.

    Raises Superseded if an earlier attempt writes into its workspace faster than the workspace can be deleted.
    """
    deadline = time.monotonic() + REVOKE_SECONDS
    for path in _workspaces(epoch.folder, before=epoch._order):
        to_delete = path
        if not path.name.endswith(".revoked"):
            to_delete = path.with_name(f"{path.name}.{secrets.token_hex(4)}.revoked")
            # Renamed first: from now on no process of this machine finds it. Those of others may have cached where it is.
            with contextlib.suppress(FileNotFoundError):
                path.rename(to_delete)
        while not _deleted(to_delete):
            if time.monotonic() >= deadline:
                raise Superseded(f"an earlier attempt still writes into {to_delete}. Delete its pods, then start again")
            time.sleep(_REVOKE_PAUSE_SECONDS)


def _deleted(path: Path) -> bool:
    """Delete a folder, and return whether that succeeded.

    Deleted files that a process of this machine still has open may remain (NFS): the result is True then, too.
    """
    shutil.rmtree(path, ignore_errors=True)
    files = [file for file in path.rglob("*") if not file.is_dir()]
    return not path.exists() or (bool(files) and all(file.name.startswith(_OPEN_DELETED_PREFIX) for file in files))
