"""The journal on disk: whole lines, and only those that were flushed count.

    add ─► added ──flush──► one write, fsync ─► done: what the records say may happen now
    compact ─► .journal.partial: written, fsync ─► renamed over the journal, fsync of the folder

Writing happens in threads, one at a time and in the order of `add`; a flush takes with it all that was added while the
one before was on its way. After a write that failed nobody knows how much of it is on disk, so nothing may follow.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from qwen35_trainer.pipeline.journal import Base, Record, compact, encode
from qwen35_trainer.pipeline.snapshot import Snapshot
from qwen35_trainer.runtime.disk import sync


class JournalNotWritten(RuntimeError):
    """The journal could not be written; names the file and what to do."""


class JournalFile:
    """The journal at `path`, from `begin` to `close`. What a crash left there is read before, with `path.read_bytes()`.

    A caller that is cancelled leaves nothing half done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._aside = path.with_name(f".{path.name}.partial")
        self._file: FileIO | None = None
        self._added: deque[bytes] = deque()  # threads may take from one end what is added at the other
        self._broken: OSError | None = None
        self._turn = asyncio.Lock()

    async def begin(self, start: Snapshot, attempt: str = "") -> None:
        """Go on from here, in place of whatever the file holds. Raises JournalNotWritten; that stays whole then."""
        await self._do(lambda: self._replace(encode(Base(start, attempt=attempt))))

    def add(self, record: Record) -> None:
        """To be written with the next flush."""
        self._added.append(encode(record))

    async def flush(self) -> None:
        """All that was added before is on disk. Raises JournalNotWritten, and so does everything after that."""
        await self._do(self._append)

    async def compact(self, batch: int) -> None:
        """Forget what led to batch `batch`, the next one of a complete checkpoint. Flushes.

        Raises JournalNotWritten when there is no space for another file, and JournalDamaged; the journal may be written
        on after either.
        """

        def act() -> None:
            self._append()
            self._replace(compact(self.path.read_bytes(), batch))

        await self._do(act)

    async def close(self) -> None:
        """What was not flushed is not written."""
        async with self._turn:
            if self._file is not None:
                self._file.close()
                self._file = None

    async def _do(self, act: Callable[[], None]) -> None:
        # Shielded: a thread cannot be stopped, and its bytes must not mix with those of the next.
        await asyncio.shield(asyncio.ensure_future(self._do_in_turn(act)))

    async def _do_in_turn(self, act: Callable[[], None]) -> None:
        async with self._turn:
            try:
                if self._broken is not None:
                    raise self._broken
                await asyncio.to_thread(act)
            except OSError as error:
                raise JournalNotWritten(
                    f"journal {self.path} was not written: {error.strerror or error}. Free space, or make the folder "
                    "writable, then continue with --resume auto"
                ) from error

    def _append(self) -> None:
        added = b"".join(self._added.popleft() for _ in range(len(self._added)))
        if not added:
            return
        if self._file is None:
            raise ValueError(f"journal {self.path} is not open: call begin first")
        try:
            _write(self._file, added)
        except OSError as error:
            self._broken = error
            raise

    def _replace(self, data: bytes) -> None:
        file = FileIO(self._aside, "w")
        try:
            _write(file, data)
            self._aside.replace(self.path)
        except OSError:
            file.close()
            self._aside.unlink(missing_ok=True)
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
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
