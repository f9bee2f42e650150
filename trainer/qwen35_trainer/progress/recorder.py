"""Appends records to the metrics file, then passes them to the sinks."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, Self

from qwen35_trainer.atomic_files import FolderWriter
from qwen35_trainer.progress.records import FinishRecord, RunRecord, SpanRecord, line_start, to_line
from qwen35_trainer.progress.sinks.sink import Sink
from qwen35_trainer.progress.span_budget import SpanBudget

SPAN_SECONDS: Final = 1.0
"""Minimum time between two writes of spans. A write takes the driver 0.1 ms, and a run may have many spans in a second."""
_BLOCK_BYTES: Final = 1 << 16


class Recorder:
    """Appends the records of a run to the metrics file, and passes them to the sinks. For use by one thread.

    A record is in the file before any sink receives it. Only spans may be in the file later, while sinks receive every
    span immediately: the spans of a second are written together, before the next other record at the latest, and in a
    long run several spans are joined to one line (`span_budget.py`). A process that dies while it writes leaves an
    incomplete last line. The next Recorder of the same file removes that line, so a resumed run continues in the same
    file.

    writer: writes into the folder of the file. None: no other attempt of the run writes there. The Recorder of a later
    attempt replaces the file by a copy, so what an earlier attempt appends after that is lost. `append` raises
    Superseded if another attempt owns the folder. It does not check this for spans.

    Raises OSError, with the name of the file, when the file cannot be opened or written, for example on a full disk.
    The file then still ends with a complete line.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = (), writer: FolderWriter | None = None) -> None:
        self._path = path
        self._writer = writer or FolderWriter(path.parent)
        self._sinks = tuple(sinks)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a buffer would keep bytes that a full disk refused, and write them into the middle of later lines.
            self._file = self._writer.open_appending(path)
            self._size = _complete_size(self._file)
            self._file.truncate(self._size)
            self._spans = SpanBudget(_count(self._file, line_start(SpanRecord)))
            self._held: list[RunRecord] = []  # spans that are due, but not written yet
            self._written_at = 0.0  # time of the last write, by time.monotonic
        except OSError as error:
            raise self._failure("open", error) from error

    def append(self, record: RunRecord) -> None:
        """Write a record to the metrics file, then to every sink. A span may be written later."""
        if isinstance(record, SpanRecord):
            self._held += self._spans.add(record)
            if time.monotonic() - self._written_at >= SPAN_SECONDS:
                self._write()
        else:
            self._check()
            if isinstance(record, FinishRecord):
                self._held += self._spans.flush()
            self._write(record)
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Write the spans that were held back, and close the file and the sinks."""
        try:
            self._held += self._spans.flush()
            self._write()
        finally:
            self._file.close()
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        try:
            self._writer.check()
        except OSError as error:
            raise self._failure("write to", error) from error

    def _write(self, *records: RunRecord) -> None:
        """Write the spans that are held back, and then `records`."""
        due, self._held = [*self._held, *records], []
        self._written_at = time.monotonic()
        lines = memoryview(b"".join(to_line(record).encode() + b"\n" for record in due))
        written = 0
        try:
            while written < len(lines):
                written += self._file.write(lines[written:])
        except OSError as error:
            self._file.truncate(self._size)
            raise self._failure("write to", error) from error
        self._size += written

    def _failure(self, verb: str, error: OSError) -> OSError:
        reason = error.strerror or str(error)
        return OSError(
            error.errno,
            f"cannot {verb} the metrics file: {reason}. Free space or choose another run folder, then resume",
            str(self._path),
        )


def _complete_size(file: BinaryIO) -> int:
    """Return the size in bytes of the complete lines of a file, up to and including the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _count(file: BinaryIO, line_start: bytes) -> int:
    """Return the number of lines that begin with `line_start`. The file is read in blocks, which takes little memory."""
    pattern, kept, count = b"\n" + line_start, b"\n", 0
    file.seek(0)
    while block := file.read(_BLOCK_BYTES * 16):
        text = kept + block
        count += text.count(pattern)
        kept = text[1 - len(pattern) :]
    return count
