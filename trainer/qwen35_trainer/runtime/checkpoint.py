"""Checkpoints that are complete or absent.

    owner.json                            whose folder this is: owner.py
    .update-000020.<attempt>.partial/     written aside: state/, random-*.pt, progress.json, manifest.yaml, then contents.json (sizes)
    update-000020/                        the same folder, renamed once everything is on disk

A crash or a full disk leaves at most a `.partial` folder, which is never read and goes with the next save. It bears the name of its
attempt: two that are alive at the same time, because a node was cut off, do not write into one folder.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from qwen35_trainer.runtime.disk import sync
from qwen35_trainer.runtime.folder import FolderRefused
from qwen35_trainer.runtime.owner import Owner, hold

PROGRESS, CONTENTS, MANIFEST = "progress.json", "contents.json", "manifest.yaml"
BLOCK = 4096
"""Bytes: with fewer free, a disk takes no more of a file."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; names the path and what to do."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two batches."""

    update: int
    batch: int
    position: int
    """The first prompt position that was never dispatched."""
    pending: tuple[int, ...]
    """Positions dispatched and not yet trained: they come first after a resume."""
    elapsed: float
    """Seconds of all attempts until here."""
    group: int = 0
    """The number of the next group."""
    journal: str = ""
    """The attempt whose journal tells what came after this."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    progress: Progress


class CheckpointStore:
    """The checkpoints of one run. Keeps the newest `keep`, which may change from one save to the next."""

    def __init__(self, folder: Path, keep: int, manifest: str = "", owner: Owner | None = None) -> None:
        """manifest: the run's, for each checkpoint to say what it is of. owner: who saves; None where nobody else can."""
        self.folder, self.keep, self._manifest, self._owner = folder, keep, manifest, owner

    async def save(self, progress: Progress, write: Callable[[Path], Awaitable[None]]) -> Path:
        """Save what `write` puts into the folder that it is given. Raises CheckpointError; earlier ones stay whole."""
        final = self.folder / f"update-{progress.update:06d}"
        name = final.name if self._owner is None else f"{final.name}.{self._owner.attempt}"
        partial = self.folder / f".{name}.partial"
        try:
            self._hold()
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            await write(partial)
            await asyncio.to_thread(self._complete_one, partial, final, progress)  # flushing to disk takes a while
        except FolderRefused as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"checkpoint {final} was not saved: {error}") from error
        except Exception as error:
            reason = _reason(error) + _full(self.folder, error)
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final} was not saved: {reason}; earlier checkpoints are untouched. "
                "Free space, then continue with --resume auto; or point spec.checkpoint.storage elsewhere, and continue with "
                "--resume and the newest of them"
            ) from error
        try:
            await asyncio.to_thread(self._forget, final)
        except FolderRefused as error:
            raise CheckpointError(f"checkpoint {final} was saved, but this run ends: {error}") from error
        return final

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, verified; None when there is none."""
        newest = self.newest
        return None if newest is None else load(newest)

    @property
    def newest(self) -> Path | None:
        """The folder of the newest complete checkpoint, which is not read."""
        complete = self._complete()
        return complete[-1] if complete else None

    def _hold(self) -> None:
        """Raises FolderRefused when the folder has become that of another attempt."""
        if self._owner is not None:
            hold(self.folder, self._owner)

    def _complete_one(self, partial: Path, final: Path, progress: Progress) -> None:
        (partial / PROGRESS).write_text(json.dumps(asdict(progress)))
        if self._manifest:
            (partial / MANIFEST).write_text(self._manifest)
        _seal(partial)
        self._hold()  # again, because writing takes minutes; from here on checkpoints of others could go
        _remove(final)  # of an attempt that came this far and was resumed from earlier
        partial.rename(final)
        sync(self.folder)

    def _forget(self, newest: Path) -> None:
        """Delete what is older than the newest `keep`, and what an attempt left that was resumed from earlier.

        Raises FolderRefused when the folder has become that of another attempt, whose checkpoints would look like such.
        """
        self._hold()
        complete = self._complete()
        kept = complete[: complete.index(newest) + 1][-self.keep :]
        for path in complete:
            if path not in kept:
                _remove(path)
        for left in self.folder.glob(".update-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _complete(self) -> list[Path]:
        found = [path for path in self.folder.glob("update-*") if path.is_dir() and _number(path) is not None]
        return sorted(found, key=lambda path: _number(path) or 0)


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointError when it is not whole."""
    if not path.is_dir() or (_number(path) is None and not (path / CONTENTS).is_file()):
        what = "is not a checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"checkpoint {path} {what}. Name one like checkpoints/update-000020 of a run's folder, or use --resume auto"
        )
    try:
        contents = json.loads((path / CONTENTS).read_text())
        progress = json.loads((path / PROGRESS).read_text())
        damaged = [name for name in {**contents, PROGRESS: 0} if _size(path / name) != contents.get(name)]
        if not damaged:
            return Checkpoint(path, Progress(**{**progress, "pending": tuple(progress["pending"])}))
        reason = f"{', '.join(damaged[:3])} missing or of another size"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = _reason(error)
    raise CheckpointError(
        f"checkpoint {path} cannot be read: {reason}. Delete that folder to resume from the one before it, "
        "or name another with --resume DIR"
    )


def _remove(path: Path) -> None:
    """Delete a checkpoint. Renamed first: half a folder must not look like a checkpoint."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _number(path: Path) -> int | None:
    """The update of a checkpoint's folder; None for a folder that only looks like one."""
    digits = path.name.removeprefix("update-")
    return int(digits) if digits.isdecimal() else None


def _seal(folder: Path) -> None:
    """Flush every file, and write down what belongs to the checkpoint."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for file in files:
        sync(file)
    contents = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    (folder / CONTENTS).write_text(json.dumps(contents))
    sync(folder / CONTENTS)
    sync(folder)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _full(folder: Path, error: Exception) -> str:
    """What an error leaves out: PyTorch's writer may end on a full disk with one that says nothing of it."""
    full = folder.is_dir() and shutil.disk_usage(folder).free < BLOCK
    return f" ({os.strerror(errno.ENOSPC)})" if full and os.strerror(errno.ENOSPC) not in _reason(error) else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"
