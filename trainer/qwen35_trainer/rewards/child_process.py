"""A child process that answers calls over a socket: the parent's code, the child's code, and the messages between them.

    ChildProcess                                    the process (its own session and process group)
    ────────────                                    ───────────────────────────────────────────────
    start(entry) ──────────── spawn ──────────────► entry(file descriptor of its socket) ─► CallServer
    call(request, seconds) ── number, bytes ──────► …
    reply, or an error ◄───── number, bytes ───────
                       ◄───── 0: heartbeat ────────
    end() ─────────────────── SIGKILL ────────────► the whole process group, then all its descendants (descendants.py)

waits on            unblocked by                                         deadline
call: reply         the process, or its death (the socket closes)        `seconds`; None: the caller watches `heard`
end: exit           the kernel                                           `patience`, then REAP_SECONDS
end: descendants    the kernel                                           _SEARCH_SECONDS of descendants.py

A message is a number, a length, and that many bytes. A reply has the number of its call. The number 0 belongs to no
call: the child sends it as a heartbeat. All waits are asynchronous, so neither event loop blocks.

The child is started as a command, not by `multiprocessing`, which would fork a process with threads (Ray), or import
the caller's main script, and torch with it, a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import BinaryIO, Final, Self

from qwen35_trainer.rewards.descendants import kill_marked, new_mark

logger = logging.getLogger(__name__)

type Frame = tuple[int, bytes]
"""The number and the content of a message."""
type RequestPart = bytes | memoryview
"""Bytes to send. A memoryview must have items of one byte, and its memory must not change until the reply arrives."""

HEADER: Final = struct.Struct("<QI")
ALIVE: Final = HEADER.pack(0, 0)
"""Heartbeat: a message with the number 0, which belongs to no call and shows that the process is alive."""
MAX_REQUEST_BYTES: Final = 2**32 - 1
SEND_BYTES: Final = 4 * 2**20
"""Size of the kernel's memory for requests that the child has not received yet, as far as the system allows it.

Whenever a part of it is free again, the event loop wakes up to send the next part of a request.
"""
REAP_SECONDS: Final = 10.0
"""Maximum wait for a killed process to end."""
DEATH_SECONDS: Final = 1.0
"""Maximum wait until a process that closed its socket exits on its own.

After this time the process is killed, and its exit code no longer shows why it closed the socket."""
_FIRST_POLL_SECONDS: Final = 0.001
_MAX_POLL_SECONDS: Final = 0.05
_SET_PARENT_DEATH_SIGNAL: Final = 1  # of prctl(2)


class FrameTooLongError(ValueError):
    """A message is longer than the receiver accepts."""


class FrameReader:
    """Splits a stream of bytes into messages. A message has a header, and a content of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._max = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Append received bytes to the buffer, and return the messages that they complete.

        Raises FrameTooLongError for a message whose content is longer than `max_bytes`.
        """
        buffer, start, frames = self._buffer, 0, []
        buffer += data
        while len(buffer) - start >= HEADER.size:
            number, length = HEADER.unpack_from(buffer, start)
            if length > self._max:
                raise FrameTooLongError(f"a message of {length} bytes; at most {self._max} are accepted")
            end = start + HEADER.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                frames.append((number, bytes(view[start + HEADER.size : end])))
            start = end
        del buffer[:start]
        return frames


def packed(number: int, content: bytes) -> bytes:
    """Return a message as bytes: the header with `number` and the length, then `content`."""
    return HEADER.pack(number, len(content)) + content


def read_frame(stream: BinaryIO) -> Frame:
    """Read one message from a blocking stream. Raises EOFError if the stream ends before the message is complete."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    number, length = HEADER.unpack(header)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return number, content


class ChildEnded(Exception):
    """The process ended before it replied.

    how: how the process ended (`exit code 3`, `signal SIGKILL`, `not reaped`), or why it was killed.
    """

    def __init__(self, how: str) -> None:
        super().__init__(f"the process ended ({how})")
        self.how = how


class ChildProcess(asyncio.Protocol):
    """A child process that answers calls. Only the event loop that started the process may use this object."""

    def __init__(self, process: subprocess.Popen[bytes], mark: dict[str, str], max_reply_bytes: int) -> None:
        self._process, self._mark = process, mark
        self._reader = FrameReader(max_reply_bytes)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, tuple[asyncio.Future[bytes], asyncio.TimerHandle | None]] = {}
        self._number = 0
        self._ending: asyncio.Task[str] | None = None
        self.refused = ""
        """Why a message of the process was refused; the process is then killed. Empty if no message was refused."""
        self.heard = time.monotonic()
        """Time at which the last bytes arrived from the process, in seconds of `time.monotonic`."""

    @classmethod
    async def start(cls, entry: str, *, max_reply_bytes: int, output: int | None = None) -> Self:
        """Start a Python process that calls `entry` with the descriptor of its socket. Raises OSError
        if the start fails.

        entry: a function, as `module:function`. max_reply_bytes: maximum size of a reply. output: descriptor for what
        the child prints; None: the child prints where this process prints.

        A child that uses `signal_when_parent_ends` ends, on Linux, when the thread that started it ends. Call `start`
        on a thread that lives as long as the child is needed.
        """
        module, _, function = entry.partition(":")
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            # -P: without the current folder on sys.path.
            code = f"from {module} import {function}; {function}({theirs.fileno()})"
            mark = new_mark()
            environment = os.environ | mark | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
            process = subprocess.Popen(  # noqa: ASYNC220, S603  # this interpreter; takes milliseconds
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
            unless_started.callback(process.wait)
            unless_started.callback(process.kill)
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            _, child = await loop.create_unix_connection(lambda: cls(process, mark, max_reply_bytes), sock=ours)
            unless_started.pop_all()
        return child

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process can receive calls. It may still be true for a moment after the process has died."""
        return self._ending is None and self._process.poll() is None

    def call(self, *request: RequestPart, seconds: float | None = None) -> asyncio.Future[bytes]:
        """Send a request, and return a future of the reply.

        The future raises TimeoutError if no reply arrives within `seconds`; the process may then still be working on
        the call. It raises ChildEnded if the process ends before it replies. seconds: None means no time-out.
        """
        self._number += 1
        number, future = self._number, self._loop.create_future()
        if self._ending is not None or self._transport is None or self._transport.is_closing():
            future.set_exception(ChildEnded("before the call"))
            return future
        timer = None if seconds is None else self._loop.call_later(seconds, _expire, future)
        self._calls[number] = future, timer
        size = sum(len(part) for part in request)
        self._transport.writelines([HEADER.pack(number, size), *request])
        return future

    async def end(self, patience: float = 0.0) -> str:
        """End the process and everything that it has started, and return how the process ended.

        First closes the socket of the process. patience: seconds in which the process may then exit on its own. After
        this time, its process group and all its other descendants are killed. Calls without a reply raise ChildEnded.
        Further calls of `end` ignore their argument, and return the result of the first one.
        """
        return await asyncio.shield(self._end(patience))

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's class does not derive from asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        try:
            frames = self._reader.feed(data)
        except FrameTooLongError as error:
            self.refused = str(error)
            self._end(0.0)
            return
        for number, reply in frames:
            future, timer = self._calls.pop(number, (None, None))
            if timer is not None:
                timer.cancel()
            if future is not None and not future.done():
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(DEATH_SECONDS)

    def _end(self, patience: float) -> asyncio.Task[str]:
        if self._ending is None:
            self._ending = self._loop.create_task(self._ended(patience))
        return self._ending

    async def _ended(self, patience: float) -> str:
        if self._transport is not None:
            self._transport.abort()
        await self._polled(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a zombie's group, on macOS
            os.killpg(self._process.pid, signal.SIGKILL)
        code = await self._polled(REAP_SECONDS)
        await asyncio.to_thread(kill_marked, self._mark)
        if code is None:
            # It hangs in the kernel, for example on a dead network file system, and cannot be killed.
            logger.error("process %d has not ended %g s after SIGKILL", self._process.pid, REAP_SECONDS)
        how = self.refused or _how(code)
        calls, self._calls = self._calls, {}
        for future, timer in calls.values():
            if timer is not None:
                timer.cancel()
            if not future.done():
                future.set_exception(ChildEnded(how))
        return how

    async def _polled(self, seconds: float) -> int | None:
        """Wait at most `seconds` until the process has ended. Return its exit code, or None if it has not ended."""
        deadline, pause = time.monotonic() + seconds, _FIRST_POLL_SECONDS
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        return code


async def end_all(processes: Sequence[ChildProcess], patience: float = 0.0) -> None:
    """End several processes at the same time.

    patience: seconds in which each process may exit on its own before it is killed.
    """
    await asyncio.gather(*(process.end(patience) for process in processes))


def _expire(future: asyncio.Future[bytes]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


def _how(code: int | None) -> str:
    if code is None:
        return "not reaped"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class CallServer(asyncio.Protocol):
    """The child's side of the socket: answers the calls of a `ChildProcess`, any number of calls at the same time.

    answer: function that returns the reply to a request. If it raises an exception, the connection ends.
    ended: a future that completes when the caller has closed the connection.
    """

    def __init__(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._answer = answer
        self._reader = FrameReader()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for number, request in self._reader.feed(data):
            task = asyncio.create_task(self._reply(number, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def stop(self) -> None:
        """Complete `ended`, as if the caller had closed the connection."""
        self.connection_lost(None)

    def pause(self) -> None:
        """Stop receiving requests until `resume` is called. New requests wait on the caller's side."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def show_alive(self) -> None:
        """Send a heartbeat: the message ALIVE, which belongs to no call."""
        assert self._transport is not None
        self._transport.write(ALIVE)

    async def _reply(self, number: int, request: bytes) -> None:
        assert self._transport is not None
        try:
            answering = self._answer(request)
            del request  # it may be large, and may be needed for a short time only
            reply = await answering
        except Exception:
            self._transport.abort()  # the caller must not wait for a reply that will not come
            raise
        self._transport.write(packed(number, reply))


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Make Linux send signal `number` to this process when the thread that started this process ends, even by SIGKILL.

    On other systems nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
