"""A proxy in front of the API server that gets in the way.

    operator of namespace a ──┐                       ┌─ what `a` is to suffer ─┐
    operator of namespace b ──┴─► http, loopback ─────┴─────────────────────────┴──► https, API server

One proxy serves many operators: each serves one namespace, so that the path shows whose request it is. A write is what
changes an object of the namespace; Events and Leases pass uncounted.

    kill_at n     the n-th write is carried out, its answer and all that follow are lost: the operator is dead to the world
    kill_always   the same with every write: no operator makes more than one
    fault         every other write fails, so that each fails once and then goes through
    cut_seconds   no watch lives longer, not even one that is open already
    replay        after each event of a watch, the events before it come again, in their order
"""

import asyncio
import json
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import aiohttp
from aiohttp import web

type Fault = Literal["conflict", "busy", "error", "timeout", "lost"]
"""409, 429, 500, and two that come after the write was carried out: 504, and a connection that breaks."""
FAULTS: Final[tuple[Fault, ...]] = ("conflict", "busy", "error", "timeout", "lost")
REFUSALS: Final[dict[Fault, tuple[int, str]]] = {
    "conflict": (409, "Conflict"),
    "busy": (429, "TooManyRequests"),
    "error": (500, "InternalError"),
    "timeout": (504, "Timeout"),
}
WRITES: Final = ("POST", "PUT", "PATCH", "DELETE")
NAMESPACE: Final = re.compile(r"^/apis?/.*?/?namespaces/([^/]+)/([^/]+)")
UNCOUNTED: Final = ("events", "leases")
REPLAYED: Final = 8
"""Events that come again."""
PASSED_ON: Final = ("authorization", "accept", "content-type", "user-agent")
MAX_LINE_BYTES: Final = 2**21


@dataclass
class Line:
    """One operator's line to the API server, and what happens on it."""

    loop: asyncio.AbstractEventLoop
    """The proxy's."""
    kill_at: int | None = None
    kill_always: bool = False
    fault: Fault | None = None
    cut_seconds: float | None = None
    replay: bool = False
    writes: int = 0
    """Carried out since the line was last armed."""
    log: list[str] = field(default_factory=list)
    """All requested writes, with their results."""
    dead: bool = False
    requests: int = 0
    suffered: int = 0
    """Deaths, failed writes, cut watches and repeated events."""
    on_death: Callable[[], object] = lambda: None
    """Called in the proxy's thread."""
    rests: Callable[[str, int | None], bool] = lambda name, version: False
    """Whether the operator knows this version of this training (None: knows that it is gone) and has nothing to do."""
    looks: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """How often operators have begun on this line, and how often the latest has looked at something."""
    _open: set[asyncio.BaseTransport] = field(default_factory=set)

    def arm(
        self,
        *,
        kill_at: int | None = None,
        kill_always: bool = False,
        fault: Fault | None = None,
        cut_seconds: float | None = None,
        replay: bool = False,
    ) -> None:
        """Count writes from zero from here on, and let this happen."""
        self.writes = self.requests = 0
        self.kill_at, self.kill_always = kill_at, kill_always
        self.fault, self.cut_seconds, self.replay = fault, cut_seconds, replay

    def die(self) -> None:
        """Nothing passes any more, in either direction. Who is dead does not die again."""
        if self.dead:
            return
        self.kill_at, self.dead = None, True
        self.suffered += 1
        for transport in list(self._open):
            transport.abort()  # type: ignore[attr-defined]
        self.on_death()

    def end(self) -> None:
        """Die, at the word of another thread."""
        self.loop.call_soon_threadsafe(self.die)

    def revive(self) -> None:
        self.dead = False


class Proxy:
    """Lines by namespace; made at the first request for one."""

    def __init__(self, server: str, session: aiohttp.ClientSession) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._session = session
        self._lines: dict[str, Line] = {}
        self.url = ""

    def line(self, namespace: str) -> Line:
        return self._lines.setdefault(namespace, Line(self._loop))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        match = NAMESPACE.match(request.path)
        line = self.line(match[1] if match else "")
        if line.dead:
            return _broken(request)
        assert request.transport is not None
        line._open.add(request.transport)
        try:
            if request.method not in WRITES or match is None or match[2] in UNCOUNTED:
                return await self._pass(request, line)
            return await self._write(request, line)
        except aiohttp.ClientError as problem:
            return _refusal(502, "BadGateway", str(problem))
        finally:
            line._open.discard(request.transport)

    async def _write(self, request: web.Request, line: Line) -> web.StreamResponse:
        line.requests += 1
        fault = line.fault if line.requests % 2 else None
        line.log.append(f"{request.method} {request.path} {fault or ''}")
        line.suffered += fault is not None
        if fault in ("conflict", "busy", "error"):
            status, reason = REFUSALS[fault]
            if fault == "conflict" and request.method == "POST":
                reason = "AlreadyExists"
            return _refusal(status, reason, f"made up: {reason}")
        answer = await self._pass(request, line)
        line.log[-1] += f" {answer.status}"
        carried_out = answer.status < 300
        line.writes += carried_out
        if carried_out and (line.kill_always or line.writes == line.kill_at):
            line.die()
        if fault == "timeout":
            return _refusal(*REFUSALS[fault], "made up: the write was carried out")
        return _broken(request) if line.dead or fault == "lost" else answer

    async def _pass(self, request: web.Request, line: Line) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url, body = f"{self._server}{request.path_qs}", await request.read()
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, skip_auto_headers=("Content-Type",)
        ) as answer:
            kept = {
                name: answer.headers[name] for name in ("Content-Type", "Date", "Retry-After") if name in answer.headers
            }
            if request.query.get("watch") not in ("true", "1") or answer.status != 200:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(headers=kept)
            await response.prepare(request)
            cutting = asyncio.create_task(_cut(request, line))
            try:
                await _stream(answer, response, line)
            finally:
                cutting.cancel()
            return response


@asynccontextmanager
async def serving(server: str, ca: Path) -> AsyncIterator[Proxy]:
    """A proxy for the API server at this address, on a free port."""
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(ca)), limit=0)
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=no_limit, read_bufsize=MAX_LINE_BYTES) as session:
        proxy = Proxy(server, session)
        # Without these, a client that goes away would leave its watch open behind it.
        runner = web.ServerRunner(
            web.Server(proxy.handle, access_log=None), handler_cancellation=True, shutdown_timeout=0.5
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        proxy.url = f"http://127.0.0.1:{port}"
        try:
            yield proxy
        finally:
            await runner.cleanup()


async def _cut(request: web.Request, line: Line) -> None:
    while line.cut_seconds is None:  # noqa: ASYNC110  # set by another thread
        await asyncio.sleep(0.1)
    await asyncio.sleep(line.cut_seconds)
    line.suffered += 1
    _broken(request)


async def _stream(answer: aiohttp.ClientResponse, response: web.StreamResponse, line: Line) -> None:
    """A watch, event by event."""
    before: deque[bytes] = deque(maxlen=REPLAYED)
    async for event in answer.content:
        await response.write(event)
        if line.replay and b'"BOOKMARK"' not in event[:40]:
            before.append(event)
            for old in list(before):
                await response.write(old)
                line.suffered += 1


def _broken(request: web.Request) -> web.Response:
    """No answer: the connection breaks."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _refusal(status: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": status,
    }
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.Response(status=status, headers=headers, body=json.dumps(body), content_type="application/json")
