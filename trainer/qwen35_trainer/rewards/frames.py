"""Messages between a process and one that it started: a number, a length, and that many bytes.

A reply has the number of its call. The number 0 belongs to no call: the sender only shows that it is alive.
"""

import struct
from typing import BinaryIO, Final

HEADER: Final = struct.Struct("<QI")
ALIVE: Final = HEADER.pack(0, 0)
"""A message with the number 0."""
MAX_REQUEST_BYTES: Final = 2**32 - 1

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
