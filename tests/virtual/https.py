"""The API server in memory for clients with sockets: over TLS, on loopback, with the rights of one account.

Time is that of the event loop that serves, not the virtual one. It serves while the cluster's own loop stands still.
"""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.testbed.certificates import Certificate
from tests.virtual.api_server import ApiServer, Request
from tests.virtual.failures import Failure
from tests.virtual.rights import Rights
from tests.virtual.watches import Watch


@asynccontextmanager
async def serving(server: ApiServer, rights: Rights, token: str, certificate: Certificate) -> AsyncIterator[str]:
    """Serve all requests with this bearer token. Yields the address."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {token}":
            return _refusal(Failure(401, "Unauthorized", reason="Unauthorized"))
        body = await request.json() if request.can_read_body else None
        api_request = Request(request.method, request.path, request.query, body, request.content_type, rights=rights)
        try:
            if "watch" in request.query:
                return await _stream(request, Watch(server, api_request))
            return web.json_response(server.answer(api_request))
        except Failure as failure:
            return _refusal(failure)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certificate, certificate.key)
    # Without these, a client that goes away would leave its watch open behind it.
    runner = web.ServerRunner(web.Server(handle, access_log=None), handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        host, port = runner.addresses[0]
        yield f"https://{host}:{port}"
    finally:
        await runner.cleanup()


async def _stream(request: web.Request, watch: Watch) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    async for line in watch.lines():
        await response.write(line)
    return response


def _refusal(failure: Failure) -> web.Response:
    return web.json_response(failure.body, status=failure.code)
