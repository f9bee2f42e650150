"""Calls over a connection: only peers that know the key are heard, and nothing is lost however a connection ends.

Real sockets on this machine. `Cuts` lies between the two ends, passes bytes on, and cuts connections where a test says.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_trainer.rollout.rollout_engine import EndReason
from qwen35_trainer.runtime import replica_channel, worker_connection
from qwen35_trainer.runtime.calls import Stalled
from qwen35_trainer.runtime.replica_channel import DropSequences, LoadWeights, ReplicaChannel, ReplicaFailed
from qwen35_trainer.runtime.rollout_worker import EngineFailed
from qwen35_trainer.runtime.worker_connection import ConnectionEnded, Endpoint, WorkerConnection, WorkerServer

from .replicas import Actor, Engine, weights

LOOPS = {"asyncio": asyncio.DefaultEventLoopPolicy, "uvloop": uvloop.EventLoopPolicy}
"""Ray's workers, and so the driver, use uvloop if it is installed, as vLLM needs it."""
HEADER = struct.Struct("<QIQ")


@pytest.fixture(scope="module", params=LOOPS.values(), ids=LOOPS)
def event_loop_policy(request) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


class Methods:
    """The methods of a worker, which count their calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = asyncio.Event()

    async def double(self, values: Any) -> Any:
        self.calls += 1
        return values * 2

    async def wait(self) -> str:
        self.calls += 1
        await self.go_on.wait()
        return "waited"

    async def fail(self) -> None:
        raise ValueError("no such tensor")

    def served(self) -> WorkerServer:
        return WorkerServer({"double": self.double, "wait": self.wait, "fail": self.fail})


@pytest.fixture
def methods() -> Methods:
    return Methods()


@asynccontextmanager
async def opened(methods: Methods) -> AsyncIterator[WorkerConnection]:
    connection = await WorkerConnection.connect(await methods.served().open("127.0.0.1"))
    try:
        yield connection
    finally:
        connection.close()


async def test_results_arrive_as_they_were_returned(methods):
    large = np.arange(3_000_000, dtype=np.int32).reshape(3, -1)
    async with opened(methods) as connection:
        assert await connection.call("double", 21) == 42
        assert await connection.call("double", b"") == b""
        received = await connection.call("double", large)
        assert np.array_equal(received, large * 2)
        small = await connection.call("double", large[:, :5])
        assert small.tolist() == (large[:, :5] * 2).tolist()


@given(
    sizes=st.lists(st.lists(st.sampled_from([0, 1, 7, 100, 65_535, 65_536, 200_000]), min_size=1), max_size=4),
    reads=st.lists(st.sampled_from([1, 3, 20, 1_000, 65_536, 1 << 20]), min_size=1),
)
def test_frames_arrive_as_they_were_sent_however_many_bytes_each_read_returns(sizes, reads):
    """Also several frames in one read, and a part in many."""
    frames, received = worker_connection._Frames(lambda *frame: received.append(frame)), list[Any]()
    frames.trust(frames._on_frame)
    written = bytearray()
    frames._transport = SimpleNamespace(
        is_closing=lambda: False, writelines=lambda parts: written.extend(b"".join(parts))
    )
    sent = [[bytes([number + 1]) * size for size in each] for number, each in enumerate(sizes)]
    for number, parts in enumerate(sent):
        frames.send(number, parts)
    at = turn = 0
    while at < len(written):
        memory = frames.get_buffer(-1)
        count = min(len(memory), reads[turn % len(reads)] if turn < 500 else 1 << 20, len(written) - at)
        memory[:count] = written[at : at + count]
        frames.buffer_updated(count)
        at, turn = at + count, turn + 1
    assert [(number, [bytes(part) for part in parts]) for number, parts in received] == list(enumerate(sent))


async def test_an_array_that_is_kept_keeps_nothing_else_of_its_message_in_memory(methods):
    kept, empty, other = (np.arange(count, dtype=np.int32) for count in (40_000, 0, 50_000))
    async with opened(methods) as connection:
        received, nothing, rest = await connection.call("double", Arrays((kept, empty, other)))
    assert [each.tolist() for each in (received, nothing)] == [(kept * 2).tolist(), []]
    memory = memory_of(received)
    assert memory.nbytes == kept.nbytes
    assert not np.shares_memory(memory, memory_of(rest))


class Arrays(tuple[Any, ...]):
    """Arrays of which each is doubled."""

    __slots__ = ()

    def __mul__(self, factor: Any) -> Arrays:
        return Arrays(each * factor for each in self)


def memory_of(array: Any) -> Any:
    """Return the array that owns the memory of `array`."""
    while (base := array.obj if isinstance(array, memoryview) else array.base) is not None:
        array = base
    return array


async def test_calls_are_answered_in_the_order_in_which_they_end(methods):
    async with opened(methods) as connection:
        waiting = asyncio.create_task(connection.call("wait"))
        assert await connection.call("double", 2) == 4
        assert not waiting.done()
        methods.go_on.set()
        assert await waiting == "waited"


async def test_the_late_result_of_a_call_that_was_given_up_is_ignored(methods):
    async with opened(methods) as connection:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.call("wait"), 0.05)
        methods.go_on.set()
        assert await connection.call("double", 2) == 4


async def test_a_method_that_fails_ends_the_connection_and_every_call(methods):
    async with opened(methods) as connection:
        waiting = asyncio.create_task(connection.call("wait"))
        with pytest.raises(ConnectionEnded):
            await connection.call("fail")
        with pytest.raises(ConnectionEnded):
            await waiting
        with pytest.raises(ConnectionEnded):
            await connection.call("double", 1)


async def test_a_result_that_cannot_be_read_ends_the_connection(methods):
    async with opened(methods) as connection:
        with pytest.raises(ConnectionEnded, match="the result of double cannot be read: no such version"):
            await connection.call("double", Unreadable())
        with pytest.raises(ConnectionEnded):
            await connection.call("double", 1)


class Unreadable:
    """Its double cannot be unpickled."""

    is_doubled = False

    def __mul__(self, _: int) -> Unreadable:
        doubled = Unreadable()
        doubled.is_doubled = True
        return doubled

    def __reduce__(self) -> Any:
        return (_refuse, ()) if self.is_doubled else (Unreadable, ())


def _refuse() -> None:
    raise ValueError("no such version")


async def test_closing_ends_the_calls_of_a_connection(methods):
    async with opened(methods) as connection:
        waiting = asyncio.create_task(connection.call("wait"))
        await asyncio.sleep(0)
        connection.close()
        with pytest.raises(ConnectionEnded):
            await waiting


async def test_the_kernel_ends_a_connection_whose_peer_has_vanished(methods):
    async with opened(methods) as connection:
        assert connection._frames._transport is not None
        end = connection._frames._transport.get_extra_info("socket")
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        probes = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
        idle, interval, count, unanswered = (end.getsockopt(socket.IPPROTO_TCP, option) for option in probes)
        assert idle + interval * count == unanswered / 1000 == worker_connection.UNANSWERED_SECONDS


# Peers that do not know the key.


async def test_a_driver_with_another_key_is_refused(methods, caplog):
    endpoint = await methods.served().open("127.0.0.1")
    with pytest.raises(ConnectionEnded):
        await WorkerConnection.connect(replace(endpoint, key=bytes(32)))
    assert "its peer does not know the key" in caplog.text
    assert methods.calls == 0


async def test_a_worker_with_another_key_is_refused_before_it_gets_a_call():
    """An impostor, which cannot compute the proof, and repeats that of the driver."""
    refused = asyncio.Event()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(0, bytes(32)))
        *_, proof = await parts_of(reader)
        writer.write(framed(0, proof))
        with contextlib.closing(writer):
            assert await closed(reader)
        refused.set()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], bytes(32))
    with contextlib.closing(server):
        with pytest.raises(ConnectionEnded, match="does not know the worker's key"):
            await WorkerConnection.connect(endpoint)
        await asyncio.wait_for(refused.wait(), 20.0)


@pytest.mark.parametrize("greeting", [(), (bytes(32), b"")], ids=["nothing", "two parts"])
async def test_a_peer_that_does_not_greet_like_a_worker_is_refused(greeting, monkeypatch):
    monkeypatch.setattr(worker_connection, "CONNECT_SECONDS", 0.5)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeting:
            writer.write(framed(0, *greeting))
        with contextlib.closing(writer):
            await closed(reader)

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], bytes(32))
    refused = pytest.raises(ConnectionEnded, match="not a worker" if greeting else "no answer")
    with contextlib.closing(server), refused:
        await WorkerConnection.connect(endpoint)


async def test_peers_that_prove_nothing_cannot_use_up_the_descriptors_of_a_worker(methods):
    endpoint = await methods.served().open("127.0.0.1")
    streams = [await asyncio.open_connection(endpoint.host, endpoint.port) for _ in range(40)]
    with contextlib.ExitStack() as stack:
        for _, writer in streams:
            stack.enter_context(contextlib.closing(writer))
        greeted = [await _is_greeted(reader) for reader, _ in streams]
    assert sum(greeted) == worker_connection.MAX_UNPROVEN


async def _is_greeted(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError, asyncio.IncompleteReadError):
        return len(await parts_of(reader)) == 1
    return False


async def test_a_worker_that_does_not_exist_or_does_not_answer_cannot_be_connected_to(monkeypatch):
    monkeypatch.setattr(worker_connection, "CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionEnded, match="no answer"):
            await WorkerConnection.connect(Endpoint("127.0.0.1", port, bytes(32)))
    with pytest.raises(ConnectionEnded, match=f"127.0.0.1:{port}"):
        await WorkerConnection.connect(Endpoint("127.0.0.1", port, bytes(32)))


async def test_a_peer_that_proves_nothing_is_disconnected(methods, monkeypatch):
    monkeypatch.setattr(worker_connection, "CONNECT_SECONDS", 0.1)
    endpoint = await methods.served().open("127.0.0.1")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    with contextlib.closing(writer):
        await parts_of(reader)
        assert await closed(reader)


class Bomb:
    """Executes code when it is unpickled."""

    exploded = False

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    Bomb.exploded = True


UNPROVEN = {
    "a call": lambda: framed(1, pickle.dumps(("double", (1,)))),
    "code": lambda: framed(0, pickle.dumps(Bomb()), bytes(32)),
    "no proof": lambda: framed(0, bytes(32)),
    "an empty proof": lambda: framed(0, bytes(32), b""),
    "a large frame": lambda: framed(0, bytes(32), bytes(10_000)),
    "an announcement of 2 GiB": lambda: HEADER.pack(0, 1, 2**31),
    "sizes beyond the beginning": lambda: HEADER.pack(0, 2, 16) + struct.pack("<QQ", 2**63, 2**63),
    "a second part of 2 GiB": lambda: HEADER.pack(0, 2, 16) + struct.pack("<QQ", 0, 2**31),
    "no part": lambda: HEADER.pack(0, 0, 0),
    "more parts than bytes": lambda: HEADER.pack(0, 9, 16) + bytes(16),
    "noise": lambda: bytes(range(256)),
}


@pytest.mark.parametrize("message", UNPROVEN.values(), ids=UNPROVEN)
async def test_what_an_unproven_peer_sends_is_never_read_and_ends_its_connection(methods, message):
    endpoint = await methods.served().open("127.0.0.1")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    with contextlib.closing(writer):
        await parts_of(reader)
        writer.write(message())
        assert await closed(reader)
    assert methods.calls == 0
    assert not Bomb.exploded
    async with opened(methods) as connection:  # others are still heard
        assert await connection.call("double", 1) == 2


def framed(number: int, *parts: bytes) -> bytes:
    sizes = b"".join(struct.pack("<Q", len(part)) for part in parts)
    return HEADER.pack(number, len(parts), len(sizes) + len(parts[0])) + sizes + b"".join(parts)


async def parts_of(reader: asyncio.StreamReader) -> list[bytes]:
    _, count, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
    sizes = struct.unpack(f"<{count}Q", await reader.readexactly(8 * count))
    return [await reader.readexactly(size) for size in sizes]


async def closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10.0) == b""
    return True


async def until(happened: Any) -> None:
    async with asyncio.timeout(20.0):
        while not happened():  # noqa: ASYNC110, anything may make it true
            await asyncio.sleep(0.002)


# A channel whose calls travel over a connection.


class Cuts:
    """Passes bytes on between a driver and a worker, and cuts each connection after the number of bytes that the test gives."""

    def __init__(self, endpoint: Endpoint, after: list[int]) -> None:
        self._endpoint, self._after = endpoint, iter(after)
        self.passed: list[int] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Endpoint]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        with contextlib.closing(server):
            yield replace(self._endpoint, port=server.sockets[0].getsockname()[1])

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        remaining, number = next(self._after, 1 << 60), len(self.passed)
        self.passed.append(0)
        there, back = await asyncio.open_connection(self._endpoint.host, self._endpoint.port)

        async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal remaining
            while remaining > 0 and (data := await source.read(min(remaining, 4096))):
                remaining -= len(data)
                self.passed[number] += len(data)
                target.write(data)

        ways = [asyncio.create_task(forward(reader, back)), asyncio.create_task(forward(there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (back, writer):
            end.transport.abort()


class Fast(Engine):
    """An engine that reports every 10 ms."""

    gather_seconds, report_seconds = 0.001, 0.01


@asynccontextmanager
async def connected(actor: Actor, *, after: list[int]) -> AsyncIterator[tuple[ReplicaChannel, Cuts]]:
    """A channel to a worker whose connections are cut."""
    worker = actor.worker
    worker._calls = WorkerServer({"exchange": worker.exchange, "obey": worker.obey})
    cuts = Cuts(await worker._calls.open("127.0.0.1"), after)
    async with cuts.open() as through:
        channel = ReplicaChannel(actor, "rollout-0")
        await channel.connect(through)
        try:
            yield channel, cuts
        finally:
            channel.close()


def actor_of() -> Actor:
    actor = Actor()
    actor.worker._engine = Fast(actor.worker._changed.set)
    return actor


def command(number: int) -> DropSequences:
    return DropSequences(((number, 0),))


@pytest.fixture
def _reconnects_immediately(monkeypatch) -> None:
    monkeypatch.setattr(replica_channel, "RECONNECT_SECONDS", 0.0)


async def test_calls_travel_over_the_connection_and_weights_in_the_object_store_through_ray():
    actor = actor_of()
    async with connected(actor, after=[]) as (channel, _):
        channel.send(command(1))
        await received(channel, 3)
        assert actor.counts == {}, "Ray carried a call"
        channel.send(LoadWeights(weights(1)))
        channel.send(command(2))
        await received(channel, 3)
        assert sum(actor.counts.values()) == 1
    assert [type(each) for each in actor.worker.applied] == [DropSequences, LoadWeights, DropSequences]


async def received(channel: ReplicaChannel, count: int) -> list[Any]:
    reports: list[Any] = []
    while len(reports) < count:
        reports += await asyncio.wait_for(channel.receive(), 20.0)
    return reports


async def test_a_worker_that_does_not_listen_is_called_through_ray():
    actor = actor_of()
    channel = ReplicaChannel(actor, "rollout-0")
    await channel.connect(None)
    channel.send(command(1))
    await received(channel, 2)
    assert actor.counts["exchange"] >= 2
    assert actor.worker.applied == [command(1)]


async def test_a_worker_that_cannot_be_connected_to_is_called_through_ray(caplog):
    actor = actor_of()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    channel = ReplicaChannel(actor, "rollout-0")
    await channel.connect(Endpoint("127.0.0.1", port, bytes(32)))
    channel.send(command(1))
    await received(channel, 2)
    assert actor.worker.applied == [command(1)]
    assert caplog.text.count("rollout-0: calls travel through Ray") == 1, "it is tried again after a while"


async def test_ray_says_immediately_why_a_connection_has_ended():
    actor = actor_of()
    async with connected(actor, after=[]) as (channel, _):
        await received(channel, 1)
        actor.worker._engine.report_seconds = 3600.0
        receiving = asyncio.create_task(received(channel, 100))
        await asyncio.sleep(0.1)
        actor.worker._engine.fail(IndexError("list index out of range"))
        with pytest.raises(ReplicaFailed, match="pod: IndexError: list index out of range") as raised:
            await receiving
    assert isinstance(raised.value.__cause__, EngineFailed)


@pytest.mark.parametrize("broken", ["command", "report"])
async def test_what_a_failed_call_has_lost_is_the_failure_of_the_replica(broken, monkeypatch):
    """The same call would succeed when it is repeated through Ray, without the command or the report."""
    actor, failures = actor_of(), iter([MemoryError("no memory for it")])

    def fail_once(*_: object) -> Any:
        for error in failures:
            raise error

    monkeypatch.setattr(actor.worker._engine, "drop" if broken == "command" else "report", fail_once)
    async with connected(actor, after=[]) as (channel, _):
        channel.send(command(1))
        with pytest.raises(ReplicaFailed, match="MemoryError: no memory for it"):
            await received(channel, 100)


async def test_a_report_goes_to_the_call_that_was_repeated_when_the_connection_ended():
    """The first call still waits at the worker, and its answer would be lost."""
    actor = actor_of()
    actor.worker._engine.report_seconds = actor.worker._engine.gather_seconds = 3600.0
    async with connected(actor, after=[]) as (channel, _):
        receiving = asyncio.create_task(received(channel, 1))
        await asyncio.sleep(0.1)
        actor.worker._engine.tell(finished={(0, 0): EndReason.STOP})  # the first call gathers now
        await asyncio.sleep(0.1)
        assert channel._connection is not None
        channel._connection.close()
        await until(lambda: actor.counts["exchange"])
        actor.worker._engine.tell(taken=((1, 0),))
        [report] = await receiving
    assert (report.finished, report.taken) == ({(0, 0): EndReason.STOP}, ((1, 0),))


async def test_calls_do_not_wait_until_a_connection_exists_again(monkeypatch):
    monkeypatch.setattr(replica_channel, "RECONNECT_SECONDS", 0.0)
    actor = actor_of()
    async with connected(actor, after=[]) as (channel, _):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            channel._endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], bytes(32))
            assert channel._connection is not None
            channel._connection.close()
            await received(channel, 20)
            assert channel._connecting is not None
            assert not channel._connecting.done()
    assert actor.counts["exchange"] >= 20


async def test_a_worker_that_is_connected_and_does_not_answer_has_failed(monkeypatch):
    monkeypatch.setattr(replica_channel, "MAX_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(replica_channel, "ANSWER_SECONDS", 0.2)
    actor = actor_of()
    actor.worker._engine.report_seconds = 60.0
    async with connected(actor, after=[]) as (channel, _):
        with pytest.raises(ReplicaFailed, match=r"rollout-0 did not finish generating within 0.2 s") as raised:
            await received(channel, 1)
    assert isinstance(raised.value.__cause__, Stalled)
    assert actor.counts == {}


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.usefixtures("_reconnects_immediately")
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 3000), max_size=8), acts=st.lists(st.sampled_from(["send", "report"]), max_size=20))
def test_each_command_and_each_report_arrives_once_and_in_order_however_often_connections_are_cut(run, cuts, acts):
    async def play() -> None:
        actor, sent, reported, arrived = actor_of(), 0, 0, []
        async with connected(actor, after=cuts) as (channel, between):

            async def receive() -> None:
                while True:
                    arrived.extend(await channel.receive())

            receiving = asyncio.create_task(receive())
            for act in acts:
                if act == "send":
                    sent += 1
                    channel.send(command(sent))
                else:
                    reported += 1
                    engine = actor.worker._engine
                    engine.tell(taken=(*engine._next.get("taken", ()), (reported, 0)))
                await asyncio.sleep(0.001)

            def all_taken() -> list[int]:
                return [name[0] for report in arrived for name in report.taken]

            await until(lambda: len(actor.worker.applied) >= sent and len(all_taken()) >= reported)
            assert not receiving.done()
            receiving.cancel()
            assert actor.worker.applied == [command(number) for number in range(1, sent + 1)]
            assert all_taken() == list(range(1, reported + 1))
            assert [report.number for report in arrived] == list(range(1, len(arrived) + 1))
            assert len(between.passed) >= 1

    run(play())


@pytest.fixture(autouse=True)
def _no_bomb() -> Iterator[None]:
    Bomb.exploded = False
    yield
    Bomb.exploded = False
