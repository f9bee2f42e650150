"""The side of a started process: answers the calls of the process that started it (child_process.py)."""

import asyncio
import ctypes
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from qwen35_trainer.rewards.frames import ALIVE, FrameReader, packed

_SET_PARENT_DEATH_SIGNAL: Final = 1  # of prctl(2)


class CallServer(asyncio.Protocol):
    """Answers any number of calls at the same time.

    answer: returns the reply to a request; an exception ends the connection. ended: is done when the other side has
    closed the connection.
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

    def pause(self) -> None:
        """Receive no requests until `resume`. The other side keeps them."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def show_alive(self) -> None:
        """Send the message that belongs to no call."""
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
    """Let Linux send the signal to this process when the thread that started it ends, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
