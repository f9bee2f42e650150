"""Calls over a connection with Ray's TLS: nothing can be read on the way, and only peers with a certificate are heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwen35_operator.desired.ray_tls import VARIABLES
from qwen35_trainer.contract.shared_names import TLS_FOLDER
from qwen35_trainer.runtime import worker_connection
from qwen35_trainer.runtime.worker_connection import ConnectionEnded, Endpoint, WorkerConnection
from tests.runtime.test_ray_tls import files
from tests.runtime.test_worker_connection import LOOPS, Methods, closed

SECRET = b"a prompt that nobody may read"


@pytest.fixture(scope="module", params=LOOPS.values(), ids=LOOPS)
def event_loop_policy(request) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one authority."""
    return files(tmp_path_factory.mktemp("own") / "tls")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another authority."""
    return files(tmp_path_factory.mktemp("foreign") / "tls")


@pytest.fixture
def use(monkeypatch):
    """use(folder): from now on this process has the variables of a pod with these certificates; None: of one without TLS."""

    def set_variables(folder: Path | None) -> None:
        for name, value in VARIABLES.items():
            if folder is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value.replace(TLS_FOLDER, str(folder)))

    return set_variables


@pytest.fixture
def methods() -> Methods:
    return Methods()


@asynccontextmanager
async def tapped(endpoint: Endpoint, seen: bytearray) -> AsyncIterator[Endpoint]:
    """An endpoint that passes on all bytes to another one, and adds them to `seen`."""

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            seen.extend(data)
            target.write(data)

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(endpoint.host, endpoint.port)
        with contextlib.closing(writer), contextlib.closing(back):
            await asyncio.gather(forward(reader, back), forward(there, writer))

    server = await asyncio.start_server(passed, "127.0.0.1", 0)
    with contextlib.closing(server):
        yield replace(endpoint, port=server.sockets[0].getsockname()[1])


@pytest.mark.parametrize("encrypted", [True, False])
async def test_with_tls_nothing_can_be_read_on_the_way(encrypted, own, use, methods):
    use(own if encrypted else None)
    large = np.frombuffer(SECRET * 100_000, np.uint8)
    seen = bytearray()
    async with tapped(await methods.served().open("127.0.0.1"), seen) as endpoint:
        connection = await WorkerConnection.connect(endpoint)
        with contextlib.closing(connection):
            assert await connection.call("double", SECRET) == SECRET * 2
            assert np.array_equal(await connection.call("double", large), large * 2)
    assert (SECRET in seen) is not encrypted
    assert len(seen) > 2 * large.nbytes


@pytest.mark.parametrize("driver", ["without TLS", "of another authority"])
async def test_a_driver_without_a_certificate_of_the_authority_is_refused(
    driver, own, foreign, use, methods, monkeypatch
):
    monkeypatch.setattr(worker_connection, "CONNECT_SECONDS", 1.0)
    use(own)
    endpoint = await methods.served().open("127.0.0.1")
    use(None if driver == "without TLS" else foreign)
    with pytest.raises(ConnectionEnded):
        await WorkerConnection.connect(endpoint)
    assert methods.calls == 0
    use(own)
    connection = await WorkerConnection.connect(endpoint)  # others are still heard
    with contextlib.closing(connection):
        assert await connection.call("double", 1) == 2


@pytest.mark.parametrize("worker", ["without TLS", "of another authority"])
async def test_a_worker_without_a_certificate_of_the_authority_is_refused(
    worker, own, foreign, use, methods, monkeypatch
):
    monkeypatch.setattr(worker_connection, "CONNECT_SECONDS", 1.0)
    use(None if worker == "without TLS" else foreign)
    endpoint = await methods.served().open("127.0.0.1")
    use(own)
    with pytest.raises(ConnectionEnded):
        await WorkerConnection.connect(endpoint)
    assert methods.calls == 0


async def test_a_worker_whose_certificate_is_for_another_address_is_refused(own, use, methods):
    """127.0.0.2 is an address of this machine, but not one of the certificate."""
    use(own)
    endpoint = await methods.served().open("127.0.0.2")
    with pytest.raises(ConnectionEnded, match="certificate"):
        await WorkerConnection.connect(endpoint)


async def test_a_peer_that_shows_no_certificate_is_disconnected(own, use, methods, monkeypatch):
    monkeypatch.setattr(worker_connection, "CONNECT_SECONDS", 0.2)
    use(own)
    endpoint = await methods.served().open("127.0.0.1")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    with contextlib.closing(writer):
        assert await closed(reader)


async def test_peers_that_show_no_certificate_keep_nobody_out(own, use, methods):
    use(own)
    endpoint = await methods.served().open("127.0.0.1")
    with contextlib.ExitStack() as stack:
        for _ in range(2 * worker_connection.MAX_UNPROVEN):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            stack.enter_context(contextlib.closing(writer))
        connection = await WorkerConnection.connect(endpoint)
        with contextlib.closing(connection):
            assert await connection.call("double", 1) == 2


async def test_certificates_that_cannot_be_read_are_an_error_of_the_connection(own, use, methods, tmp_path):
    use(own)
    endpoint = await methods.served().open("127.0.0.1")
    use(tmp_path)
    with pytest.raises(ConnectionEnded, match="No such file"):
        await WorkerConnection.connect(endpoint)
    with pytest.raises(OSError, match="No such file"):
        await methods.served().open("127.0.0.1")
