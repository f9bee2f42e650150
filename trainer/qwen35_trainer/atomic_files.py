"""Files that are complete or absent, whenever the process or the machine stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path


@dataclass(frozen=True)
class FolderWriter:
    """Writes files and folders into a folder, so that each is complete or absent.

    One process writes at a time. `qwen35_trainer.epoch.Epoch` is for folders into which several attempts of a run may write.
    """

    folder: Path

    def check(self) -> None:
        """Check that this process may write into the folder. Raises an exception if it may not."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context manager for writing at a `place`: an OSError becomes the exception of `check`, if that is its cause."""
        yield

    def place(self, name: str) -> Path:
        """Return the path at which a file or folder `name` is made, before `publish` renames it."""
        return self.folder / f".{name}.partial"

    def publish(self, made: Path, path: Path) -> None:
        """Rename what was made at a `place` to `path`, where it replaces a file or an empty folder."""
        made.replace(path)

    def delete(self, path: Path) -> None:
        """Delete a file or a folder if it exists.

        It is renamed first, because a folder that is half deleted must not look complete.
        """
        if not path.exists():
            return
        to_delete = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(to_delete, ignore_errors=True)
        path.rename(to_delete)
        if to_delete.is_dir():
            shutil.rmtree(to_delete, ignore_errors=True)
        else:
            to_delete.unlink()

    def open_appending(self, path: Path) -> FileIO:
        """Open a file for reading and appending, without a buffer. It is created if it does not exist."""
        return path.open("a+b", buffering=0)

    def clean(self) -> None:
        """Delete what killed processes have left."""
        for leftover in self.folder.glob(".update-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def write(self, path: Path, content: str | bytes, *, durable: bool = False) -> None:
        """Write a file, so that a reader never sees half of it. durable: return only when the file is on disk.

        If writing fails, this method raises an OSError with the name of the file.
        """
        made = self.place(path.name)
        try:
            with self.guarded():
                _write(made, content, durable=durable)
            self.publish(made, path)
            if durable:
                sync(path.parent)
        except OSError as error:
            _clean_up(made, path, error)
            raise


def write_atomically(path: Path, content: str | bytes, *, suffix: str = "partial", durable: bool = False) -> None:
    """Write `content` to `.<name>.<suffix>` and rename that file to `path`, so that a reader never sees half a file.

    suffix: must differ between processes that may write the same file at the same time. durable: return only when the file
    is on disk. If writing fails, this function removes `.<name>.<suffix>` and raises an OSError with the name of the file.
    """
    partial = path.with_name(f".{path.name}.{suffix}")
    try:
        _write(partial, content, durable=durable)
        partial.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        _clean_up(partial, path, error)
        raise


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data` to a file without a buffer. Raises OSError if that fails; a part may be written then."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync(path: Path) -> None:
    """Flush a file, or the list of a folder's entries, to disk. Raises OSError if that fails or `path` does not exist."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: str | bytes, *, durable: bool) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if durable:
        sync(path)


def _clean_up(partial: Path, path: Path, error: OSError) -> None:
    if error.filename is None:  # as when the disk is full
        error.filename = str(path)
    partial.unlink(missing_ok=True)
