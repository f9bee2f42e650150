"""Files that are complete or absent, whenever the process or the machine stops."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, suffix: str = "partial", durable: bool = False) -> None:
    """Write to `.<name>.<suffix>` and rename it to `path`, so that a reader never sees half a file.

    suffix: must differ between processes that may write the same file at the same time. durable: return only when the file
    is on disk. If writing fails, removes the file `.<name>.<suffix>` and raises OSError, which names a file.
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
    """Flush a file, or the list of a folder's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
