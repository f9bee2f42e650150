"""Files that are complete or absent, whenever the process or the machine stops."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, suffix: str = "partial", durable: bool = False) -> None:
    """Write `content` to `.<name>.<suffix>` and rename that file to `path`, so that a reader never sees half a file.

    suffix: must differ between processes that may write the same file at the same time. durable: return only when the file
    is on disk. If writing fails, this function removes `.<name>.<suffix>` and raises an OSError with the name of the file.
    """
    partial = path.with_name(f".{path.name}.{suffix}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        if error.filename is None:  # as when the disk is full
            error.filename = str(path)
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the list of a folder's entries, to disk. Raises OSError if that fails or `path` does not exist."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
