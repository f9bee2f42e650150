"""Saves, loads and deletes checkpoints. Saving is atomic: a checkpoint is complete or absent. `checkpoint.keep` sets the retention.

    owner.json                            the attempt that owns the folder: qwen35_trainer/epoch.py
    .epoch-000003-…/update-000020/        written first: state/, random-*.pt, progress.json, manifest.yaml, rows.json, then contents.json (sizes)
    update-000020/                        the same folder, renamed once everything is on disk

A crash or a full disk leaves at most a folder in the attempt's workspace. That folder is never read, and the next save
deletes it. A save replaces a checkpoint of the same update only if another attempt has left it there: an attempt saves
nothing at the update at which it began in this folder (`train_session.py`). The checkpoint from which the attempt began
therefore stays complete until a later one is.

Two attempts may run at the same time if a node was cut off from the network. Then only the owner of the folder renames
anything there: the other attempt ends with Superseded, and deletes nothing.

Each step of a save runs in a daemon thread and has a deadline, because storage that does not answer holds a thread for
ever. After a deadline, nothing more is asked of the storage, not even the reason.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from qwen35_trainer.atomic_files import FolderWriter, sync
from qwen35_trainer.epoch import Epoch, FolderRefused, Superseded
from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.runtime.background import Unfinished, done_within

META_FILE, CONTENTS_FILE, MANIFEST_FILE, ROWS_FILE = "progress.json", "contents.json", "manifest.yaml", "rows.json"
MIN_FREE_BYTES = 4096
"""Free space of a disk, in bytes, below which the disk counts as full."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written. The message contains the path and what to do."""

    failure = FailureReason.CHECKPOINT_UNUSABLE


class StorageFailed(CheckpointError):
    """A checkpoint could not be written, or its storage could not be read. This may be temporary."""

    failure = FailureReason.STORAGE_FAILED


@dataclass(frozen=True)
class CheckpointMeta:
    """The state of a run between two batches, besides weights and optimizer: the contents of progress.json."""

    update: int
    batch: int
    position: int
    """Position, in the order of all epochs, of the first prompt that was never dispatched."""
    pending: tuple[int, ...]
    """Positions of prompts that were dispatched, and whose groups have neither trained, failed nor been filtered.

    After a resume these prompts are dispatched first.
    """
    elapsed: float
    """Duration of all attempts so far, in seconds."""
    group: int = 0
    """Number that the next dispatched group gets."""
    journal: str = ""
    """Name of the attempt whose journal contains the events after this checkpoint. Empty: unknown."""
    kl_coefficient: float | None = None
    """Coefficient of the KL penalty that `algorithm.kl.adaptive` had reached. None: the coefficient is fixed, or an old
    release saved the checkpoint."""
    kl_first: float | None = None
    """The coefficient in the manifest with which the adaptation of `kl_coefficient` began. None: the coefficient is
    fixed, or an old release saved the checkpoint."""


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    progress: CheckpointMeta


class CheckpointStore:
    """The checkpoints of one run. Keeps the newest `keep` checkpoints; `keep` may change between saves.

    Each save deletes all other checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        manifest: str = "",
        epoch: Epoch | None = None,
        stall_seconds: float | None = None,
        rows: str = "",
    ) -> None:
        """Open the checkpoints in `folder`.

        keep: number of checkpoints to keep. manifest: manifest of the run as YAML, which each checkpoint contains; "":
        no manifest is saved. epoch: the period in which the attempt that saves owns the folder; None: no other attempt can
        save here. stall_seconds: maximum duration of each step of a save, which is `spec.async.stallSeconds`; None: no
        limit. rows: the rows on which the run trains, as JSON, which each checkpoint contains; "": none are saved.
        """
        self.folder, self.keep, self._manifest, self._rows = folder, keep, manifest, rows
        self._stall_seconds = stall_seconds
        self.writer: FolderWriter = epoch or FolderWriter(folder)

    async def save(self, progress: CheckpointMeta, write: Callable[[Path], Awaitable[None]]) -> Path:
        """Save a checkpoint, and return its path. Then delete old checkpoints.

        If saving fails, earlier checkpoints stay complete.

        progress: the state of the run, for progress.json. write: called with an empty folder, into which it writes all
        files of the train ranks. Raises StorageFailed if the files cannot be written, old checkpoints cannot be deleted,
        or the storage does not answer in time; Superseded if another attempt owns the folder; FolderRefused if
        owner.json is damaged; and MemoryError if a rank had too little memory.
        """
        final = self.path_of(progress.update)
        earlier, made = True, None
        try:
            earlier = await done_within(self._stall_seconds, self._has_complete)
            made = await done_within(self._stall_seconds, partial(self._begin, final.name))
            await write(made)
            await done_within(self._stall_seconds, partial(self._finish, made, final, progress))
        except Unfinished as error:
            raise self._unanswered(f"checkpoint {final} was not saved") from error
        except Exception as error:
            explain = partial(self._not_saved, final, made, error, earlier=earlier)
            try:
                reason = await done_within(self._stall_seconds, explain)
            except Unfinished:
                reason = StorageFailed(
                    f"checkpoint {final} was not saved: {_reason(error)}; {_advice(earlier=earlier)}"
                )
            raise reason from error
        try:
            await done_within(self._stall_seconds, partial(self._delete_old, final))
        except Unfinished as error:
            raise self._unanswered(f"checkpoint {final} was saved, but old checkpoints were not deleted") from error
        return final

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest complete checkpoint, after verifying the sizes of its files. None: there is no checkpoint.

        Raises CheckpointError if a file is missing or damaged, and StorageFailed if the storage cannot be read at present.
        """
        newest = self.newest
        return None if newest is None else load(newest)

    @property
    def newest(self) -> Path | None:
        """The folder of the newest complete checkpoint. None if there is no checkpoint. Its files are not verified."""
        complete = self.complete
        return complete[-1] if complete else None

    def path_of(self, update: int) -> Path:
        """Return the folder of the checkpoint of update number `update`, which may not exist."""
        return self.folder / f"update-{update:06d}"

    def _has_complete(self) -> bool:
        return bool(self.complete)

    def _begin(self, name: str) -> Path:
        """Create the empty folder for the files of a checkpoint, and return its path.

        Raises Superseded if another attempt owns the folder of the checkpoints, and OSError if the disk fails.
        """
        made = self.writer.place(name)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        return made

    def _finish(self, made: Path, final: Path, progress: CheckpointMeta) -> None:
        (made / META_FILE).write_text(json.dumps(asdict(progress)))
        if self._manifest:
            (made / MANIFEST_FILE).write_text(self._manifest)
        if self._rows:
            (made / ROWS_FILE).write_text(self._rows)
        _seal(made)
        # An attempt may have reached this update before the run resumed from an earlier one.
        self.writer.replace(made, final)
        sync(self.folder)

    def _delete_old(self, newest: Path) -> None:
        """Delete old checkpoints. Of the checkpoints up to `newest`, the last `keep` are kept.

        Checkpoints of later updates than `newest` are deleted too, because this run will make those updates again. If
        another attempt owns the folder, nothing is deleted and Superseded is raised, because the later checkpoints may
        belong to that attempt. Raises StorageFailed if the disk fails.
        """
        try:
            self.writer.check()
            complete = self.complete
            kept = [path for path in complete if update_of(path) <= update_of(newest)][-self.keep :]
            for path in complete:
                if path not in kept:
                    self.writer.delete(path)
            self.writer.clean()
        except (Superseded, FolderRefused) as error:
            raise _ended(f"checkpoint {newest} was saved, but this run ends", error) from error
        except OSError as error:
            reason = _reason(error) + _full(self.folder, error)
            raise StorageFailed(
                f"checkpoint {newest} was saved, but old checkpoints were not deleted: {reason}. Free space, or make the "
                "folder writable, then continue with --resume auto"
            ) from error

    def _not_saved(self, final: Path, made: Path | None, error: Exception, *, earlier: bool) -> Exception:
        """Delete the incomplete checkpoint `made`, and return the exception for a save that failed with `error`.

        final: the path at which the checkpoint would be. earlier: whether earlier checkpoints may exist. The result is
        Superseded if another attempt owns the folder, which explains why writing failed, FolderRefused if owner.json is
        damaged, MemoryError if a rank had too little memory, and otherwise StorageFailed.
        """
        what = f"checkpoint {final} was not saved"
        reason = _reason(error) + _full(self.folder, error)  # before room is made
        _discard(made)
        if isinstance(error, (Superseded, FolderRefused)):
            return _ended(what, error)
        with contextlib.suppress(OSError):  # the disk may fail again; `error` is reported then
            try:
                self.writer.check()
            except (Superseded, FolderRefused) as ended:
                return _ended(what, ended)
        if reason_of(error) is FailureReason.OUT_OF_MEMORY:
            return MemoryError(f"{what}: {reason}")
        return StorageFailed(f"{what}: {reason}; {_advice(earlier=earlier)}")

    def _unanswered(self, what: str) -> StorageFailed:
        """Return the error for storage that does not answer. what: what happened to a checkpoint, for the message."""
        return StorageFailed(
            f"{what}: the storage of {self.folder} did not answer within spec.async.stallSeconds {self._stall_seconds:g} s. "
            "Check the mount and its file server, or raise that time, then continue with --resume auto"
        )

    @property
    def complete(self) -> list[Path]:
        """The folders of the complete checkpoints, in order of their updates. Their files are not verified."""
        folders = [path for path in self.folder.glob("update-*") if path.is_dir() and _number(path) is not None]
        return sorted(folders, key=lambda path: _number(path) or 0)


def load(path: Path) -> SavedCheckpoint:
    """Return the checkpoint at `path` after verifying that it is complete.

    A checkpoint is complete if every file exists and has the size that was recorded when it was written. Tensors
    are not read here. Raises CheckpointError if the checkpoint is not complete, and StorageFailed if it cannot be
    read at present.
    """
    if not path.is_dir() or (_number(path) is None and not (path / CONTENTS_FILE).is_file()):
        what = "is not a checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"checkpoint {path} {what}. Name one like checkpoints/update-000020 of a run's folder, or use --resume auto"
        )
    unusable = True
    try:
        contents = json.loads((path / CONTENTS_FILE).read_text())
        progress = json.loads((path / META_FILE).read_text())
        damaged = [name for name in {**contents, META_FILE: 0} if _size(path / name) != contents.get(name)]
        if not damaged:
            return SavedCheckpoint(path, CheckpointMeta(**{**progress, "pending": tuple(progress["pending"])}))
        reason = f"{', '.join(damaged[:3])} missing or of another size"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = _reason(error)
        unusable = not isinstance(error, OSError) or isinstance(error, FileNotFoundError)
    raise (CheckpointError if unusable else StorageFailed)(
        f"checkpoint {path} cannot be read: {reason}. Delete that folder to resume from the one before it, "
        "or name another with --resume DIR"
    )


def attempt_of(path: Path) -> str | None:
    """Return the name of the attempt that saved the checkpoint at `path`.

    The result is empty if the checkpoint contains no such name, and None if the storage cannot be read at present.
    """
    try:
        return str(json.loads((path / META_FILE).read_text())["journal"])
    except FileNotFoundError:
        return ""
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        return ""


def update_of(path: Path) -> int:
    """Return the number of the update in the name of a checkpoint's folder; -1 for any other name."""
    number = _number(path)
    return -1 if number is None else number


def _number(path: Path) -> int | None:
    """Return the number of the update in the name of a checkpoint's folder; None for any other name."""
    digits = path.name.removeprefix("update-")
    return int(digits) if digits.isdecimal() else None


def _seal(folder: Path) -> None:
    """Flush every file in `folder` to disk, and write contents.json, the list of the files with their sizes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for file in files:
        sync(file)
    contents = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    (folder / CONTENTS_FILE).write_text(json.dumps(contents))
    sync(folder / CONTENTS_FILE)
    sync(folder)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _discard(made: Path | None) -> None:
    """Delete the folder of an incomplete checkpoint. None: no folder was created."""
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)


def _ended(what: str, error: Superseded | FolderRefused) -> Superseded | FolderRefused:
    """Return an error of the same class as `error`, whose message begins with `what`."""
    if isinstance(error, Superseded):
        return Superseded(f"{what}: {error}", by_later_attempt=error.by_later_attempt)
    return FolderRefused(f"{what}: {error}")


def _advice(*, earlier: bool) -> str:
    """Return advice for the case that a checkpoint was not saved. earlier: whether earlier checkpoints may exist."""
    if not earlier:
        return (
            "it would have been the first one. Free space, or point spec.checkpoint.storage elsewhere, then begin again with "
            "--resume auto"
        )
    return (
        "earlier checkpoints are untouched. Free space, then continue with --resume auto; or point spec.checkpoint.storage "
        "elsewhere, and continue with --resume and the newest of them"
    )


def _full(folder: Path, error: Exception) -> str:
    """Return a note that the disk of `folder` is full.

    The result is "" if the disk has space, or if the text of `error` mentions already that it is full. The note is
    needed because errors of PyTorch's writer may not mention that the disk is full.
    """
    full = False
    with contextlib.suppress(OSError):  # a broken disk may fail again; `error` is reported then
        full = shutil.disk_usage(folder).free < MIN_FREE_BYTES
    return f" ({os.strerror(errno.ENOSPC)})" if full and os.strerror(errno.ENOSPC) not in _reason(error) else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"
