"""Appends records to the metrics file, then hands them to the sinks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, Self

from qwen35_trainer.progress.records import Record, to_line
from qwen35_trainer.progress.sinks.base import Sink

_BLOCK: Final = 1 << 16


class Recorder:
    """The metrics file of a run, open for appending, and the sinks that mirror it. For one thread.

    A record is in the file before any sink sees it. A process that dies while writing leaves a torn last line; the
    next Recorder of the same file cuts it off, so a resumed run goes on in the same file.

    Raises OSError naming the file when it cannot be opened or written, such as on a full disk; the file then still
    ends with its last complete line.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self._path = path
        self._sinks = tuple(sinks)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a buffer would keep what a full disk refused, and write it into the middle of later lines.
            self._file = path.open("a+b", buffering=0)
            self._size = _complete_size(self._file)
            self._file.truncate(self._size)
        except OSError as error:
            raise self._failure("open", error) from error

    def append(self, record: Record) -> None:
        line = memoryview(to_line(record).encode() + b"\n")
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(self._size)
            raise self._failure("write to", error) from error
        self._size += written
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failure(self, act: str, error: OSError) -> OSError:
        reason = error.strerror or str(error)
        return OSError(
            error.errno,
            f"cannot {act} the metrics file: {reason}. Free space or choose another run folder, then resume",
            str(self._path),
        )


def _complete_size(file: BinaryIO) -> int:
    """Bytes up to and with the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
