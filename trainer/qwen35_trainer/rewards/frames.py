"""Messages between a process and one that it started: a number, a length, and that many bytes.

A reply has the number of its call. The number 0 belongs to no call: the sender only shows that it is alive.
"""

import asyncio
import ctypes
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import BinaryIO, Final

HEADER: Final = struct.Struct("<QI")
ALIVE: Final = HEADER.pack(0, 0)
"""A message with the number 0."""
MAX_REQUEST_BYTES: Final = 2**32 - 1
_SET_PARENT_DEATH_SIGNAL: Final = 1  # of prctl(2)

type Frame = tuple[int, bytes]
"""The number and the content of a message."""


class FrameTooLongError(ValueError):
    """A message is longer than the receiver accepts."""


class FrameReader:
    """Splits a stream of bytes into messages of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._max = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the messages that are complete now. Raises FrameTooLongError."""
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
    """Return one message."""
    return HEADER.pack(number, len(content)) + content


def read_frame(stream: BinaryIO) -> Frame:
    """Read one message from a blocking stream. Raises EOFError at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    number, length = HEADER.unpack(header)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return number, content


class CallServer(asyncio.Protocol):
    """The side of the started process: answers any number of calls at the same time.

    answer: returns the reply to a request; an exception ends the connection. ended: is done when the other side has closed the connection.
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
        """End as if the other side had closed the connection."""
        self.connection_lost(None)

    def show_alive(self) -> None:
        """Send the message that belongs to no call."""
        assert self._transport is not None
        self._transport.write(ALIVE)

    async def _reply(self, number: int, request: bytes) -> None:
        assert self._transport is not None
        try:
            reply = await self._answer(request)
        except Exception:
            self._transport.abort()  # the caller must not wait for a reply that will not come
            raise
        self._transport.write(packed(number, reply))


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Let Linux send the signal to this process when the thread that started it ends, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
