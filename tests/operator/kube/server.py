"""An HTTP server that answers by a script: each request takes the next step. It records all requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from qwen35_operator.kube.client import RestClient
from tests.patience import PATIENCE

type Step = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers with the first remaining step of `script`. If it is empty, requests wait until the test ends."""

    def __init__(self) -> None:
        self.script: list[Step] = []
        self.requests: list[web.Request] = []
        self.bodies: list[str] = []
        self.url = ""
        self._over = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.text())
        if not self.script:
            await self._over.wait()
            return web.Response(status=503)
        return await self.script.pop(0)(request)

    def end(self) -> None:
        self._over.set()

    def client(self, **options: Any) -> RestClient:
        configuration = Configuration()
        configuration.host = self.url
        return RestClient(configuration, **options)


@asynccontextmanager
async def serving[Kind: Server](server: Kind) -> AsyncIterator[Kind]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        server.end()
        await runner.cleanup()


async def until(holds: Callable[[], object], what: str) -> None:
    """Return once it holds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    while not holds():
        if loop.time() > end:
            raise AssertionError(f"not within {PATIENCE:.0f} s: {what}")
        await asyncio.sleep(0.01)


def says(body: Any, status: int = 200, **headers: str) -> Step:
    """JSON, or text as it is."""

    async def step(_: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers)

    return step


def refuses(status: int, message: str = "no", **details: Any) -> Step:
    return says({"kind": "Status", "code": status, "message": message, "details": details}, status)


def silent(seconds: float) -> Step:
    """Answers after so long."""

    async def step(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.json_response({})

    return step


def page(*items: Any, version: int = 1, token: str = "") -> Step:
    more = {"continue": token} if token else {}
    return says({"metadata": {"resourceVersion": str(version), **more}, "items": list(items)})


def stream(*events: Any, last: bytes = b"", cut: bool = False, stays: bool = False) -> Step:
    """A watch: the events, some bytes, then a proper end, a cut, or silence."""

    async def step(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        await response.write(last)
        if stays:
            await asyncio.sleep(3600)
        if cut:
            request.transport.close()  # what was written arrives first; the end that HTTP requires never does
        return response

    return step


def event(kind: str, raw: Any) -> dict:
    return {"type": kind, "object": raw}


def bookmark(version: int) -> dict:
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
