"""Shared memory of several processes of one host. The kernel frees it when the last of these processes has ended.

    creator: memfd ──/proc/PROCESS/fd/N──► other processes open the same memory: writers, readers
       │                                        │
       └─ writes only while it holds the        └─ a reader holds a shared lock as long as any tensor of it exists,
          exclusive lock (flock)                   or until its process ends, however it ends

A segment has no name in a file system, so nothing remains after any process is killed, and the size of /dev/shm does not matter:
in a pod, a segment counts towards the memory limit. Linux only (memfd_create(2)).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.free_memory import free_memory

type Memory = NDArray[np.uint8]

IS_SUPPORTED = sys.platform == "linux"
HEADER_BYTES = 64
"""Size of a segment's header, which contains the version. 64 bytes, so that the weights start at a cache line."""
NO_VERSION = -1
"""The version of a segment to which no weights have been written yet."""
MAX_MAPPED = 2
"""Maximum number of segments that a reader keeps mapped: the two that take turns (`SegmentPool`)."""


class SegmentUnavailable(RuntimeError):
    """A segment cannot be read: no process holds it any more, it is being written, or it has another version."""

    failure = FailureReason.WORKER_LOST


class TooLittleMemory(MemoryError):
    """The memory of the machine or of the container does not suffice for a copy of the weights."""

    failure = FailureReason.OUT_OF_MEMORY


@dataclass(frozen=True)
class SegmentHandle:
    """The name, size and holders of a segment, with which another process of the host opens the segment."""

    name: str
    size: int
    holders: tuple[tuple[int, int], ...]
    """Processes that hold the segment, as (process id, file descriptor).

    While one of them runs, the segment can be opened.
    """


class MemorySegment:
    """Memory that this process shares with others. One version after another is written to it.

    The process maps the memory only once, because mapping takes as long as copying.
    """

    def __init__(self, handle: SegmentHandle, descriptor: int, *, writable: bool) -> None:
        self._descriptor = descriptor
        self._closed = weakref.finalize(self, os.close, descriptor)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = _mapped(descriptor, HEADER_BYTES + handle.size, access)
        self._header = np.frombuffer(self._map, np.int64, 1)
        self.data: Memory = np.frombuffer(self._map, np.uint8, handle.size, HEADER_BYTES)
        others = [holder for holder in handle.holders if holder[0] != os.getpid()]
        self.handle = replace(handle, holders=((os.getpid(), descriptor), *others))

    @classmethod
    def create(cls, size: int) -> MemorySegment:
        """Create a segment of `size` bytes. Raises TooLittleMemory if less memory is free."""
        _check_room(size, copies=1)
        name = f"qwen35-weights-{uuid.uuid4().hex}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, HEADER_BYTES + size)
        return cls(SegmentHandle(name, size, ()), descriptor, writable=True)

    @classmethod
    def open(cls, handle: SegmentHandle, *, writable: bool = False) -> MemorySegment:
        """Open the segment of a handle. writable: whether this process may write to the segment.

        Raises SegmentUnavailable if no process holds the segment any more, and TooLittleMemory if it cannot be mapped.
        """
        for process, held in handle.holders:
            try:
                descriptor = os.open(f"/proc/{process}/fd/{held}", os.O_RDWR if writable else os.O_RDONLY)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            # The process may have ended, and its number may be another's.
            if handle.name in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                return cls(handle, descriptor, writable=writable)
            os.close(descriptor)
        processes = ", ".join(str(process) for process, _ in handle.holders)
        raise SegmentUnavailable(f"no process holds the weights any more; looked at {processes or 'none'}")

    @property
    def version(self) -> int:
        return int(self._header[0])

    @version.setter
    def version(self, version: int) -> None:
        self._header[0] = version

    def lock_for_writing(self) -> bool:
        """Lock the segment exclusively, so that no process can read it until `unlock`.

        Returns True if the segment is locked, and False if it cannot be locked, because a process reads or writes it now.
        """
        return _locked(self._descriptor, fcntl.LOCK_EX)

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def read(self) -> Memory | None:
        """Return the bytes of the segment, locked against writing; None while the segment is being written.

        The lock lasts as long as the array, or anything that shares its memory, exists.
        """
        # A lock belongs to an opened file, so each reader opens it again. Views of the array refer to the array, not to the mapping.
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)
        if not _locked(descriptor, fcntl.LOCK_SH):
            os.close(descriptor)
            return None
        data: Memory = np.frombuffer(self._map, np.uint8, self.handle.size, HEADER_BYTES)
        weakref.finalize(data, os.close, descriptor)
        return data


class MappedSegments:
    """A cache of the segments of other processes that this process has mapped.

    If a later version is written to the same segment, the existing mapping is used again. A new mapping would take as
    long as copying the version.
    """

    def __init__(self) -> None:
        self._opened: dict[str, MemorySegment] = {}  # by name, the last used one at the end

    def open(self, handle: SegmentHandle) -> MemorySegment:
        """Return the segment of a handle, mapped.

        It stays mapped until MAX_MAPPED other segments have been opened (LRU eviction). Raises the errors
        of `MemorySegment.open`.
        """
        segment = self._opened.pop(handle.name, None) or MemorySegment.open(handle)
        self._opened[handle.name] = segment
        while len(self._opened) > MAX_MAPPED:
            del self._opened[next(iter(self._opened))]
        return segment


def _check_room(size: int, *, copies: int) -> None:
    """Raise TooLittleMemory if less memory is free than `copies` segments of `size` bytes take."""
    if copies * size > (available := free_memory()):
        what = "a copy of the weights needs" if copies == 1 else f"{copies} copies of the weights need"
        raise TooLittleMemory(
            f"{what} {copies * size / 1e9:.3g} GB of shared memory, and {available / 1e9:.3g} GB are available. Use a "
            "machine with more memory, or in a pod a higher memory limit (spec.pods), or a smaller model"
        )


def _mapped(descriptor: int, size: int, access: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size, access=access)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise TooLittleMemory(f"{size / 1e9:.3g} GB of weights cannot be mapped: {error.strerror}") from error


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SegmentPool:
    """The segments to which one version after another is written: one is in service while the next one is written.

    A third segment is created if an older version is still needed or read. The memory of an old version is not freed:
    a segment that nobody needs is written again, because the first write to memory takes ten times as long as later
    writes. Without `turns`, further segments that nobody needs are closed.
    """

    def __init__(self, turns: int = 0) -> None:
        """Create an empty pool.

        turns: number of segments that the first `claim` creates together. All segments of one size are then kept even if
        nobody needs them. 0: each segment is created when it is needed.
        """
        self._segments: list[MemorySegment] = []
        self._turns = turns

    @property
    def segments(self) -> tuple[MemorySegment, ...]:
        return tuple(self._segments)

    @property
    def handles(self) -> tuple[SegmentHandle, ...]:
        return tuple(segment.handle for segment in self._segments)

    def claim(self, version: int, size: int, needed: Sequence[int] | frozenset[int] = ()) -> MemorySegment:
        """Return a segment of `size` bytes for `version`, locked for writing.

        The caller writes the version, then calls `unlock`. needed: versions whose segments must not be overwritten,
        even if nobody reads them now. Raises TooLittleMemory if the segments that must be created do not fit into the
        memory together.
        """
        kept: list[MemorySegment] = []
        free: list[MemorySegment] = []
        for segment in self._segments:
            if segment.version in needed or not segment.lock_for_writing():
                kept.append(segment)
            elif segment.data.size == size:
                free.append(segment)
        wanted = max(1, self._turns - len(kept))
        if not self._turns:
            free = free[:wanted]  # further ones are closed
        if (missing := wanted - len(free)) > 0:
            # Together, because the memory of a new segment counts as free until it is written.
            _check_room(size, copies=missing)
        if not free:
            free.append(MemorySegment.create(size))
            free[0].lock_for_writing()
        free += [_written_once(size) for _ in range(wanted - len(free))]
        free[0].version = version
        self._segments = [*kept, *free]
        return free[0]


def _written_once(size: int) -> MemorySegment:
    """Return a new segment without a version, of which each page has been written once (pre-faulted).

    The kernel provides a page at its first write, which takes ten times as long as later writes.
    """
    segment = MemorySegment.create(size)
    segment.version = NO_VERSION
    segment.data[:: mmap.PAGESIZE] = 0
    return segment
