"""Calls of a worker's methods over a TCP connection, which take the driver much less time than calls through Ray.

    driver: WorkerConnection.call(method, …) ─── frame ──► worker: WorkerServer ─► method(…)
                               result ◄───────── frame ──────────────┘

    connect:  both show certificates of the pods' authority, if Ray uses TLS (`ray_tls.py`)
              driver ◄── nonce ──────────── worker
              driver ─── nonce, proof ────► worker compares the proof with its own
              driver ◄── proof ──────────── worker

waits on                          unblocked by                             deadline
connecting                        the worker's proof                       CONNECT_SECONDS
a connection without certificate  the driver's certificate                 CONNECT_SECONDS, then it is closed
a connection without proof        the driver's proof                       CONNECT_SECONDS, then it is closed
a call                            its result, the end of the connection    the caller's
a silent peer                     it reads, or its kernel answers probes   UNANSWERED_SECONDS, then the connection ends

A connection only makes calls cheaper. Its end does not mean that the worker is lost: `call` then raises ConnectionEnded, and the
caller repeats the call through Ray, which knows whether the process has ended, and why. Methods that are called here must
therefore allow repeated calls. The errors of methods do not travel: a worker whose method raises an error ends the connection.

Messages are pickled, so a peer that can send one can execute code. Both ends therefore prove that they know the key of the worker,
which travels only through Ray, before they unpickle anything. With Ray's TLS (spec.pods.tls), connections are encrypted too, and both ends
need a certificate of its authority. Without it nothing is encrypted, including the key, which then protects only from peers that cannot read
the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import pickle
import secrets
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.runtime.ray_tls import client_context, server_context

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""Maximum time to connect, in which both ends show their certificates and prove that they know the key."""
UNANSWERED_SECONDS = 20
"""Time after which a connection ends if its peer reads nothing of what was sent, or does not answer the probes of the kernel."""
MAX_UNPROVEN = 16
"""Maximum number of connections to a worker whose peers have not yet proved that they know the key. Further ones are closed."""
MAX_FRAME_BYTES = 2**31
"""Maximum size of a frame. A connection that announces a larger one is closed."""
_MAX_PROOF_BYTES = 256
"""Maximum size of a frame before the peer has proved that it knows the key."""
_KEY_BYTES = 32
_LARGE_BYTES = 64 * 1024
"""Size from which an array stays out of the pickle. Copying a smaller one takes less time than another array."""
_HEADER = struct.Struct("<QIQ")
"""Of a frame: number of the call, number of parts, bytes of the beginning. The beginning has the sizes of all parts, and the first part.

The other parts follow.
"""
_SIZE_BYTES = 8
_ARRIVAL_BYTES = 64 * 1024
"""Size of the memory into which a connection reads what may be several short parts, or several frames, at a time.

Each read costs a turn of the event loop, and the header and the beginning of a frame are short.
"""

type ByteBuffer = bytes | bytearray | memoryview


class ConnectionEnded(ConnectionError):
    """The connection to a worker ended, or could not be made. A call may have been carried out although its result is lost."""


@dataclass(frozen=True)
class Endpoint:
    """The address at which a worker takes calls. key: the secret by which both ends recognise each other."""

    host: str
    port: int
    key: bytes = field(repr=False)


class WorkerServer:
    """The worker's end of the connections: carries out calls of `methods` for each peer that knows the worker's key."""

    def __init__(self, methods: Mapping[str, Callable[..., Awaitable[object]]]) -> None:
        self._methods = methods
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: set[_Frames] = set()
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> Endpoint:
        """Listen on a free port of the address `host`, and return the endpoint.

        Raises OSError if that is impossible, or if Ray uses TLS and its certificates cannot be used.
        """
        tls, deadline = await _certificates(server_context)
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, host, 0, ssl=tls, ssl_handshake_timeout=deadline
        )
        return Endpoint(host, self._server.sockets[0].getsockname()[1], self._key)

    def _accept(self) -> _Frames:
        """Return the protocol of a new connection, which carries out no call before the driver's proof.

        With TLS, the connection exists once the driver has shown a certificate.
        """
        nonce = secrets.token_bytes(_KEY_BYTES)

        def prove(_: int, parts: Sequence[memoryview]) -> None:
            deadline.cancel()
            nonces = nonce + bytes(parts[0])
            if len(parts) != 2 or not hmac.compare_digest(bytes(parts[1]), _proof(self._key, b"driver", nonces)):
                logger.warning("a connection was closed, because its peer does not know the key of this worker")
                frames.close()
                return
            self._unproven.discard(frames)
            frames.trust(lambda number, call: self._carry_out(frames, number, call))
            frames.send(0, [_proof(self._key, b"worker", nonces)])

        def greet() -> None:
            self._unproven.add(frames)
            if len(self._unproven) > MAX_UNPROVEN:
                frames.close()
            frames.send(0, [nonce])

        frames = _Frames(prove, opened=greet, ended=lambda: self._unproven.discard(frames))
        deadline = asyncio.get_running_loop().call_later(CONNECT_SECONDS, frames.close)
        return frames

    def _carry_out(self, frames: _Frames, number: int, call: Sequence[memoryview]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(frames, number, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, frames: _Frames, number: int, call: Sequence[memoryview]) -> None:
        """Carry out one call and send its result.

        Any error ends the connection, and the driver repeats the call through Ray. A method must therefore raise an error
        again if it is called again.
        """
        try:
            method, arguments = _value_of(call)
            result = _parts_of(await self._methods[method](*arguments))
        except Exception:  # raised again by the repeated call
            logger.warning("the connection ends, because a call failed", exc_info=True)
            frames.close()
        else:
            frames.send(number, result)


class WorkerConnection:
    """The driver's end of a connection to one worker, whose methods it calls. Use `connect` to create an instance."""

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Future[Sequence[memoryview]]] = {}
        self._numbers = itertools.count(1)
        self._frames = _Frames(self._received, ended=self._end)
        self._ended = False

    @classmethod
    async def connect(cls, endpoint: Endpoint) -> WorkerConnection:
        """Connect to a worker.

        Raises ConnectionEnded if that fails or takes longer than CONNECT_SECONDS, or if the peer is not that worker.
        """
        connection = cls()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection._open(endpoint)
        except (OSError, TimeoutError) as error:
            connection.close()
            raise ConnectionEnded(f"{endpoint.host}:{endpoint.port}: {str(error) or 'no answer'}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def _open(self, endpoint: Endpoint) -> None:
        """Connect, send a proof, and compare that of the worker, each of which is the answer to a frame with number 0."""
        loop = asyncio.get_running_loop()
        self._calls[0] = greeting = loop.create_future()
        tls, deadline = await _certificates(client_context)
        await loop.create_connection(
            lambda: self._frames, endpoint.host, endpoint.port, ssl=tls, ssl_handshake_timeout=deadline
        )
        worker_nonce = _single(await greeting)
        nonce = secrets.token_bytes(_KEY_BYTES)
        nonces = worker_nonce + nonce
        self._calls[0] = proof = loop.create_future()
        self._frames.send(0, [nonce, _proof(endpoint.key, b"driver", nonces)])
        if not hmac.compare_digest(_single(await proof), _proof(endpoint.key, b"worker", nonces)):
            raise ConnectionEnded("the peer does not know the worker's key")
        self._frames.trust(self._received)

    async def call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401  # a worker's result
        """Call a method of the worker and return its result.

        Raises ConnectionEnded if the connection ends before the result arrives. If the result cannot be unpickled,
        `call` ends the connection, and raises ConnectionEnded too.
        """
        if self._ended or not self._frames.is_open:
            raise ConnectionEnded("the connection has ended")
        number = next(self._numbers)
        self._calls[number] = result = asyncio.get_running_loop().create_future()
        try:
            self._frames.send(number, _parts_of((method, arguments)))
            parts = await result
        finally:
            self._calls.pop(number, None)
        try:
            return _value_of(parts)
        except Exception as error:
            self.close()
            raise ConnectionEnded(f"the result of {method} cannot be read: {error}") from error

    def close(self) -> None:
        """End the connection. Calls that are in progress raise ConnectionEnded."""
        self._frames.close()
        self._end()

    def _received(self, number: int, parts: Sequence[memoryview]) -> None:
        """Pass a frame to the call of its number, unless that call was given up."""
        if (call := self._calls.pop(number, None)) is not None and not call.done():
            call.set_result(parts)

    def _end(self) -> None:
        self._ended = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(ConnectionEnded("the connection has ended"))
                call.exception()  # retrieved here too, because its caller may be cancelled now, and asyncio would log it


class _Frames(asyncio.BufferedProtocol):
    """Sends and receives frames. Before `trust`, frames must be small.

    received: called with the number and the parts of each frame. opened: called when the connection exists, ended: when it has
    ended. Each part has memory of its own, which is not used again, so a part that is kept keeps no other part in memory.
    """

    def __init__(
        self,
        received: Callable[[int, Sequence[memoryview]], object],
        *,
        opened: Callable[[], object] | None = None,
        ended: Callable[[], object] | None = None,
    ) -> None:
        self._on_frame, self._on_open, self._on_end = received, opened, ended
        self._limit = _MAX_PROOF_BYTES
        self._transport: asyncio.Transport | None = None
        self._arrivals = _memory(_ARRIVAL_BYTES)  # what is read when the next part is shorter than this
        self._header = memoryview(bytearray(_HEADER.size))
        self._number = self._count = 0
        self._rest = self._header  # the memory of the present part that is not filled yet
        self._beginning: memoryview | None = None  # of the present frame, once its header has arrived
        self._parts: list[memoryview] = []  # of the present frame, once its beginning has arrived
        self._missing: deque[memoryview] = deque()  # those parts that are filled after `_rest`

    def trust(self, received: Callable[[int, Sequence[memoryview]], object]) -> None:
        """Allow frames of up to MAX_FRAME_BYTES from now on, and pass them to `received`.

        This method is called when the peer has proved that it knows the worker's key. Before, only short frames are
        allowed.
        """
        self._on_frame, self._limit = received, MAX_FRAME_BYTES

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, number: int, parts: Sequence[ByteBuffer]) -> None:
        """Send a frame. Does nothing if the connection has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
        header = _HEADER.pack(number, len(parts), len(sizes) + len(parts[0]))
        self._transport.writelines([header + sizes, *parts])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop, which Ray uses, is not a subclass
        _notice_vanished_peer(transport.get_extra_info("socket"))
        if self._on_open is not None:
            self._on_open()

    def eof_received(self) -> None:
        self.close()  # otherwise bytes that the peer does not read would keep half of the connection open

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._expect_header()  # frees the memory of an incomplete frame
        if self._on_end is not None:
            self._on_end()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest if self._is_long else self._arrivals

    def buffer_updated(self, count: int) -> None:
        if self._is_long:
            self._fill(count)
            return
        arrived = self._arrivals[:count]
        while len(arrived) and self.is_open:
            copied = min(len(arrived), len(self._rest))
            self._rest[:copied] = arrived[:copied]
            arrived = arrived[copied:]
            self._fill(copied)

    @property
    def _is_long(self) -> bool:
        """Whether what is missing of the present part is read to its place, and nothing else with it."""
        return len(self._rest) >= _ARRIVAL_BYTES

    def _fill(self, count: int) -> None:
        self._rest = self._rest[count:]
        if not len(self._rest):
            self._filled()

    def _expect_header(self) -> None:
        self._rest, self._beginning, self._parts, self._missing = self._header, None, [], deque()

    def _filled(self) -> None:
        """Choose the part that is filled next, because the present one is full, or pass the frame on if it is complete."""
        if self._beginning is None:
            self._number, self._count, size = _HEADER.unpack(self._header)
            if not 0 < self._count * _SIZE_BYTES <= size <= self._limit:
                logger.warning("a connection was closed, because a frame was to begin with %d bytes", size)
                self.close()
                return
            self._beginning = self._rest = _memory(size)
            return
        if not self._parts:
            parts = _parts_in(self._beginning, self._count, self._limit)
            if parts is None:
                logger.warning("a connection was closed, because the sizes of a frame's parts are impossible")
                self.close()
                return
            self._parts, self._missing = parts, deque(part for part in parts[1:] if len(part))
        if self._missing:
            self._rest = self._missing.popleft()
            return
        parts = self._parts
        self._expect_header()
        self._on_frame(self._number, parts)


async def _certificates(
    context: Callable[[], ssl.SSLContext | None],
) -> tuple[ssl.SSLContext, float] | tuple[None, None]:
    """Return the TLS of a connection and the deadline of its handshake in seconds; None for both if Ray uses no TLS."""
    tls = await asyncio.to_thread(context)
    return (None, None) if tls is None else (tls, CONNECT_SECONDS)


def _single(parts: Sequence[memoryview]) -> bytes:
    """Return the only part of a frame. Raises ConnectionEnded if it has several, which no worker sends before it is trusted."""
    if len(parts) != 1:
        raise ConnectionEnded("the peer is not a worker")
    return bytes(parts[0])


def _memory(size: int) -> memoryview:
    return memoryview(np.empty(size, np.uint8))  # not filled with zeros first


def _parts_in(beginning: memoryview, count: int, limit: int) -> list[memoryview] | None:
    """Return the first part of a frame, and memory for its other parts.

    beginning: the sizes of all `count` parts, and the first part. limit: maximum number of bytes of sizes and parts together.
    Returns None if the sizes do not fit the beginning or the limit.
    """
    start = count * _SIZE_BYTES
    sizes = struct.unpack(f"<{count}Q", beginning[:start])
    if start + sizes[0] != len(beginning) or start + sum(sizes) > limit:
        return None
    return [beginning[start:], *map(_memory, sizes[1:])]


type Packed = tuple[bytes, list[NDArray[np.uint8]]]
"""A pickled value, and the memory of its large arrays, to which the pickle refers."""


def pack(value: object) -> Packed:
    """Return the pickle of a value, and the memory of its large arrays, which is not copied."""
    arrays: list[NDArray[np.uint8]] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= _LARGE_BYTES:
            arrays.append(np.frombuffer(memory, np.uint8))
        return memory.nbytes < _LARGE_BYTES

    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=is_small), arrays


def unpack(packed: Packed) -> Any:  # noqa: ANN401  # what `pack` got
    """Return the value from which `pack` made `packed`. The value shares the memory of the large arrays."""
    pickled, arrays = packed
    return pickle.loads(pickled, buffers=arrays)  # noqa: S301  # from a process of this run


def _parts_of(value: object) -> list[ByteBuffer]:
    """Return the parts of a frame with a value: its pickle, and then the memory of each large array."""
    pickled, arrays = pack(value)
    return [pickled, *(array.data for array in arrays)]


def _value_of(parts: Sequence[memoryview]) -> Any:  # noqa: ANN401  # what `_parts_of` got
    """Return the value from which `_parts_of` made `parts`. It shares the memory of the large arrays."""
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # the peer has proved that it belongs to this run


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    """Return what only a peer that knows the key can compute. role: of the peer, so that neither can repeat the other's."""
    return hmac.digest(key, role + nonces, "sha256")


def _notice_vanished_peer(connection: socket.socket) -> None:
    """Let the kernel end a connection whose peer answers nothing for UNANSWERED_SECONDS, as when its machine has vanished."""
    probes = 3
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): UNANSWERED_SECONDS // 4,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): UNANSWERED_SECONDS // 4,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): probes,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): UNANSWERED_SECONDS * 1000,
    }
    for (level, option), value in options.items():
        with contextlib.suppress(OSError):  # a kernel without it notices later
            connection.setsockopt(level, option, value)
