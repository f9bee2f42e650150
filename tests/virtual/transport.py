"""What stands between the operator's RestClient and the API server in memory: requests and answers without sockets.

It takes the place of kubernetes.aio's RESTClientObject, so that the operator's whole client is under test: deadlines,
repetitions, the server's time, errors and the lines of watches.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import aiohttp

from tests.virtual.api_server import ApiServer, Request
from tests.virtual.failures import Failure
from tests.virtual.rights import Rights
from tests.virtual.watches import Watch

TRAVEL_SECONDS = 0.002
"""Time of a request to the server, and of its answer back."""


class Disturber(Protocol):
    """What happens on the way: may raise aiohttp.ClientError, or Failure in the server's place."""

    def before(self, request: Request) -> None: ...

    def after(self, request: Request) -> None: ...

    def watched(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]: ...


class Undisturbed:
    """Nothing happens on the way."""

    def before(self, request: Request) -> None:
        pass

    def after(self, request: Request) -> None:
        pass

    def watched(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return lines


class Response:
    """The part of aiohttp.ClientResponse that RestClient reads."""

    def __init__(self, status: int, body: bytes, date: float, lines: AsyncIterator[bytes] | None = None) -> None:
        self.status = status
        self.headers = {"Date": formatdate(date, usegmt=True)}
        self.content = SimpleNamespace(iter_any=lambda: self._whole() if lines is None else lines)
        self._body = body

    async def _whole(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(TRAVEL_SECONDS)
        yield self._body

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self._whole()])

    def close(self) -> None:
        pass


class Transport:
    """The requests of one user. away: while True, nothing answers."""

    def __init__(self, server: ApiServer, rights: Rights | None, disturber: Disturber) -> None:
        self.away = False
        self._server = server
        self._rights = rights
        self._disturber = disturber

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Any, _request_timeout: aiohttp.ClientTimeout
    ) -> SimpleNamespace:
        """Send a request. Raises aiohttp.ClientError if nothing answers."""
        await asyncio.sleep(TRAVEL_SECONDS)
        if self.away:
            raise aiohttp.ClientConnectionError("the API server is away")
        parts = urlsplit(url)
        request = Request(
            method=method,
            path=parts.path,
            query=dict(parse_qsl(parts.query)),
            body=body,
            content=headers["Content-Type"],
            accept=headers["Accept"],
            user=headers["User-Agent"],
            rights=self._rights,
        )
        return SimpleNamespace(response=self._response(request))

    async def close(self) -> None:
        """Like a pool of connections."""

    def _response(self, request: Request) -> Response:
        now = self._server.clock()
        try:
            self._disturber.before(request)
            if request.query.get("watch") == "true":
                lines = self._disturber.watched(self._lines(Watch(self._server, request)))
                return Response(200, b"", now, lines)
            answer = self._server.answer(request)
            self._disturber.after(request)
        except Failure as failure:
            return Response(failure.code, json.dumps(failure.body).encode(), now)
        return Response(201 if request.method == "POST" else 200, json.dumps(answer).encode(), now)

    async def _lines(self, watch: Watch) -> AsyncIterator[bytes]:
        async for line in watch.lines():
            if self.away:
                raise aiohttp.ClientConnectionError("the API server is away")
            yield line
