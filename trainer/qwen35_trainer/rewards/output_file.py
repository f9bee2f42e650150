"""Log rotation: a file of limited size for what other processes print. A full file is renamed to `.1`.

    processes of reward functions ─► pipe ─► a thread: write ─► rewards-0.log ── full ──► rewards-0.log.1, which is overwritten

waits on                unblocked by                                              deadline
the thread: the pipe    output, or the end of all processes that can write to it  none: the thread ends with its process
a process that prints   the thread, unless the disk hangs                         the time-out of the call (isolated.py)
close: the thread       the thread, when all output is written                    CLOSE_SECONDS
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO, Final

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 8 * 2**20
"""Maximum size of an output file. The previous file, whose name ends in `.1`, has the same limit."""
CLOSE_SECONDS: Final = 0.5
_READ_BYTES: Final = 2**16  # the capacity of a pipe


class OutputFile:
    """A pipe, and a thread that writes what arrives in the pipe to the file `path`.

    Output that cannot be written to the disk is lost; only the first such error is logged.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._warned = False
        self._reader, self.descriptor = os.pipe()
        """descriptor: the end of the pipe to which other processes write their output."""
        self._thread = threading.Thread(target=self._run, name="output of rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close this process's end of the pipe, then wait until all output is in the file.

        Waits at most CLOSE_SECONDS, because other processes may still be able to write to the pipe.
        """
        os.close(self.descriptor)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with os.fdopen(self._reader, "rb", buffering=0) as reader:
            while data := reader.read(_READ_BYTES):
                try:
                    self._write(data)
                except OSError as error:
                    if not self._warned:
                        self._warned = True
                        logger.warning("output of rewards is missing in %s: %s", self._path, error.strerror)
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        """Append `data` to the file, and create the file if necessary.

        If the file would become too large, rename it and begin a new file.
        """
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._size = self._path.stat().st_size
        if self._size and self._size + len(data) > self._max_bytes:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._write(data)
            return
        self._size += self._file.write(data)
