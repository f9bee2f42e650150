"""The file of the journal: a write-ahead log in complete lines.

A line counts only after it was flushed to disk (fsync).

    add ─► added ──flush──► one write, fsync ─► done: the recorded actions may be carried out
    compact ─► a file next to it: written, fsync ─► renamed over the journal, fsync of the folder

Threads write one at a time and in the order of `add`. A flush also writes everything that was added during the previous
flush. After a failed write, the end of the file is unknown, so every later write fails too. Before each write, the
attempt checks that it still owns the folder (qwen35_trainer/epoch.py). A write that takes too long counts as failed,
although its thread may still complete it. Every attempt begins a separate file, so an earlier attempt never appends to
the journal of a later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path

from qwen35_trainer.atomic_files import FolderWriter, sync, write_all
from qwen35_trainer.epoch import Superseded
from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.pipeline.journal import JournalBase, JournalRecord, compact, encode
from qwen35_trainer.runtime.background import Unfinished, done_within


class JournalNotWritten(RuntimeError):
    """The journal could not be written to disk. The message contains the path of the file and what to do."""

    failure = FailureReason.STORAGE_FAILED


class JournalNotRead(RuntimeError):
    """The journal exists and cannot be read. The message contains the path of the file and what to do."""

    failure = FailureReason.STORAGE_FAILED


def read_journal(path: Path) -> bytes:
    """Return the contents of the journal that an earlier attempt left at `path`; b"" if the file does not exist.

    Raises JournalNotRead if the disk fails.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise JournalNotRead(
            f"journal {path} was not read: {error.strerror or error}. Make the file readable, then continue with --resume "
            "auto. Without the file, the run continues from the position in the checkpoint"
        ) from error


class JournalFile:
    """The journal of a run, in the file `path`: a log of what happens to each prompt, from which a run can resume.

    The file is open from `begin` to `close`. `begin` replaces the file, so the journal of an earlier attempt must be
    read first, with `read_journal`. If a task that waits for a write is cancelled, the write still completes.
    """

    def __init__(self, path: Path, writer: FolderWriter | None = None, stall_seconds: float | None = None) -> None:
        """Create a journal that is not open yet.

        writer: writes into the folder of the journal; None: no other attempt of the run writes there. stall_seconds:
        maximum duration of a write, which is `spec.async.stallSeconds`; None: no limit.
        """
        self.path = path
        self._stall_seconds = stall_seconds
        self._writer = writer or FolderWriter(path.parent)
        self._file: FileIO | None = None
        self._added: deque[bytes] = deque()  # threads may take from one end what is added at the other
        self._broken: OSError | None = None
        self._turn = asyncio.Lock()

    async def begin(self, start: SchedulingSnapshot, attempt: str = "") -> None:
        """Replace the file by a journal that begins at the state `start`. attempt: name of the attempt that writes it.

        Raises JournalNotWritten if the disk fails, and Superseded if another attempt owns the folder. After an error,
        the file is still complete: it is the old or the new journal.
        """
        await self._do(partial(self._replace, encode(JournalBase(start, attempt=attempt))))

    def add(self, record: JournalRecord) -> None:
        """Add a record in memory. The next flush writes it to disk."""
        self._added.append(encode(record))

    async def flush(self) -> None:
        """Write all added records to disk.

        Raises JournalNotWritten if the disk fails, and Superseded if another attempt owns the folder. After a failed
        write, every later write fails too.
        """
        await self._do(self._append)

    async def compact(self, batch: int) -> None:
        """Flush, and remove the records before batch `batch`, which a complete checkpoint has made unnecessary.

        Raises JournalDamaged if the journal is damaged, JournalNotWritten if the disk fails, and Superseded if another
        attempt owns the folder. If the flush succeeds and only writing the shortened file fails, the journal can still
        be used.
        """
        await self._do(partial(self._compact, batch))

    async def close(self) -> None:
        """Close the file. Records that were not flushed are dropped.

        If the disk does not answer, the file stays open until the process ends.
        """
        async with self._turn:
            if self._file is not None and not isinstance(self._broken, TimeoutError):
                file, self._file = self._file, None
                with contextlib.suppress(Unfinished):
                    await done_within(self._stall_seconds, file.close)

    async def _do(self, act: Callable[[], None]) -> None:
        # Shielded: a thread cannot be stopped, and its bytes must not mix with those of the next.
        await asyncio.shield(asyncio.ensure_future(self._do_in_turn(act)))

    async def _do_in_turn(self, act: Callable[[], None]) -> None:
        async with self._turn:
            try:
                if self._broken is not None:
                    raise self._broken
                await done_within(self._stall_seconds, act)
            except Unfinished as error:
                # The thread may still write, so nothing may be written after it.
                reason = f"the disk did not answer within spec.async.stallSeconds {self._stall_seconds:g} s"
                self._broken = TimeoutError(errno.ETIMEDOUT, reason)
                raise self._not_written(self._broken) from error
            except OSError as error:
                raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> JournalNotWritten:
        advice = "Free space, or make the folder writable"
        if isinstance(error, TimeoutError):
            advice = "Check the mount and its file server"
        reason = error.strerror or error
        return JournalNotWritten(
            f"journal {self.path} was not written: {reason}. {advice}, then continue with --resume auto"
        )

    def _append(self) -> None:
        if not self._added:
            return
        self._writer.check()
        added = b"".join(self._added.popleft() for _ in range(len(self._added)))
        file = self._opened
        try:
            _write(file, added)
        except OSError as error:
            self._broken = error
            raise

    def _compact(self, batch: int) -> None:
        self._append()
        # Not from `path`, where a later attempt may have its own journal.
        file = self._opened
        file.seek(0)
        self._replace(compact(file.readall(), batch))

    @property
    def _opened(self) -> FileIO:
        if self._file is None:
            raise ValueError(f"journal {self.path} is not open: call begin first")
        return self._file

    def _replace(self, data: bytes) -> None:
        # Not `FolderWriter.write`: the new file stays open, because later records are appended to it.
        made = self._writer.place(self.path.name)
        with self._writer.guarded():
            file = FileIO(made, "w+")
        try:
            with self._writer.guarded():
                _write(file, data)
            self._writer.publish(made, self.path)
        except (OSError, Superseded):
            file.close()
            made.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file = file
        try:
            sync(self.path.parent)
        except OSError as error:
            self._broken = error
            raise


def _write(file: FileIO, data: bytes) -> None:
    write_all(file, data)
    os.fsync(file.fileno())
