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
    # Path.exists raises PermissionError in a folder that may not be searched, and takes a link to nothing for nothing.
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    within = "" if nearest == folder else f": {nearest}"
    if not os.path.isdir(nearest):  # noqa: PTH112
        what = "a link to nothing" if nearest.is_symlink() and not os.path.exists(nearest) else "a file"  # noqa: PTH110
        return f"{folder}{within} is {what}; name a folder"
    try:  # permissions alone do not tell: not of /proc, nor of a read-only disk
        Path(tempfile.mkdtemp(prefix=".qwen35-", dir=nearest)).rmdir()
    except OSError as error:
        return f"{folder}: {nearest} cannot be written ({error.strerror}); name another folder"
    return None
