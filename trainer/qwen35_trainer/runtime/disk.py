"""What has to be on disk before something else may happen, and whether it can be."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or what a folder lists. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written into a folder, which need not exist, and what to do; None where it can. Leaves nothing there."""
    # Path.exists raises PermissionError in a folder that may not be searched.
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    within = "" if nearest == folder else f": {nearest}"
    if not nearest.is_dir():
        return f"{folder}{within} is a file; name a folder"
    try:  # permissions alone do not tell: not of /proc, nor of a read-only disk
        Path(tempfile.mkdtemp(prefix=".qwen35-", dir=nearest)).rmdir()
    except OSError:
        return f"{folder}: {nearest} cannot be written; name another folder"
    return None
