"""Atomic writes: a process that is killed leaves each file and folder complete or absent, never half written.

With `durable=True`, files are flushed to disk (fsync), so that this also holds when the machine fails.
"""

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
    """Publishes files and folders into one folder atomically: each is complete or absent.

    Only one process may write into the folder at a time. The subclass `qwen35_trainer.epoch.Epoch` is for a folder into
    which several attempts of a run may write.
    """

    folder: Path

    def check(self) -> None:
        """Check that this process may still write into the folder. Here it always may, so nothing is checked.

        `Epoch` overrides this method with one that raises Superseded if another attempt owns the folder.
        """

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context manager: run code that writes at a path from `place`. An error of this code is raised unchanged.

        `Epoch` overrides this method with one that raises Superseded instead of an OSError that another attempt caused.
        """
        yield

    def place(self, name: str) -> Path:
        """Return the temporary path `.<name>.partial`, at which the caller creates a file or folder. Creates nothing.

        The caller renames the finished file or folder with `publish`.
        """
        return self.folder / f".{name}.partial"

    def publish(self, made: Path, path: Path) -> None:
        """Rename `made`, a finished file or folder at a path from `place`, to `path`.

        An existing file or an empty folder at `path` is replaced. Raises OSError if `path` is a folder with contents.
        """
        made.replace(path)

    def replace(self, made: Path, path: Path) -> None:
        """Publish `made`, a finished folder at a path from `place`, at `path`, in the place of the folder that is there.

        The old folder, if there is one, is renamed first and deleted last, so that `path` is absent only between two
        renames. If publishing fails with an OSError, the old folder is renamed back.
        """
        old = self._set_aside(path)
        try:
            self.publish(made, path)
        except OSError:
            if old is not None:
                self.publish(old, path)
            raise
        if old is not None:
            _remove(old)

    def delete(self, path: Path) -> None:
        """Delete a file or a folder if it exists.

        It is first renamed, so that a folder that is half deleted does not look complete.
        """
        if (old := self._set_aside(path)) is not None:
            _remove(old)

    def _set_aside(self, path: Path) -> Path | None:
        """Rename a file or a folder to a name that nobody reads, and return its new path.

        Returns None if nothing is at `path`. Here the name is `.<name>.deleted`. `Epoch` overrides this method with one
        that renames into the workspace.
        """
        if not path.exists():
            return None
        aside = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        return aside

    def open_appending(self, path: Path) -> FileIO:
        """Open a file for reading and appending, without a buffer. Creates the file if it does not exist."""
        return path.open("a+b", buffering=0)

    def clean(self) -> None:
        """Delete the folders `.update-*`: checkpoints that a killed process was writing or deleting."""
        for leftover in self.folder.glob(".update-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def write(self, path: Path, content: str | bytes, *, durable: bool = False) -> None:
        """Write `content` to the file `path` atomically: a reader sees the old file or the new one, never half of one.

        durable: whether to flush the file to disk before this method returns. If writing fails, the old file stays, the
        unfinished file is removed, and an OSError with the name of the file is raised. In an `Epoch`, this method also
        raises Superseded and FolderRefused.
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
    """Write `content` to `.<name>.<suffix>`, and rename that file to `path`, so that a reader never sees half a file.

    suffix: must differ between processes that may write the same file at the same time. durable: whether to flush the
    file to disk before this function returns. If writing fails, this function removes `.<name>.<suffix>`, and raises an
    OSError with the name of the file.
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
    """Write all of `data` to an unbuffered file, whose method `write` may write only a part of it.

    Raises OSError if writing fails. A part of `data` may be in the file then.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync).

    Raises OSError if that fails or `path` does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a file, or as much of a folder as possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, content: str | bytes, *, durable: bool) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if durable:
        sync(path)


def _clean_up(partial: Path, path: Path, error: OSError) -> None:
    if error.filename is None:  # as when the disk is full
        error.filename = str(path)
    partial.unlink(missing_ok=True)
