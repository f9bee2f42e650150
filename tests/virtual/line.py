"""One operator's line to the API server in memory, with what tests/controlplane/proxy.py lets happen on the real one."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import aiohttp

from tests.controlplane.proxy import NAMESPACE, REFUSALS, REPLAYED, UNCOUNTED, WRITES, Fault, Line
from tests.virtual.api_server import Request
from tests.virtual.failures import Failure

ARMED_SECONDS = 1.0
"""Time after which an open watch sees that watches should be cut."""


class VirtualLine(Line):
    """Implements transport.Disturber."""

    _fault: Fault | None = None

    def before(self, request: Request) -> None:
        """Refuse the request, or let it pass. Raises Failure, and aiohttp.ClientError if the operator is dead."""
        if self.dead:
            raise aiohttp.ClientConnectionError("this operator is dead")
        if not _counted(request):
            return
        self.requests += 1
        self._fault = self.fault if self.requests % 2 else None
        self.log.append(f"{request.method} {request.path} {self._fault or ''}")
        self.suffered += self._fault is not None
        if self._fault in ("conflict", "busy", "error"):
            code, reason = REFUSALS[self._fault]
            if self._fault == "conflict" and request.method == "POST":
                reason = "AlreadyExists"
            raise Failure(code, f"made up: {reason}", reason=reason)

    def after(self, request: Request) -> None:
        """Let the answer pass, or lose it. The request has been carried out. Raises as `before` does."""
        if not _counted(request):
            return
        self.writes += 1
        if self.kill_always or self.writes == self.kill_at:
            self.die()
        if self._fault == "timeout":
            code, reason = REFUSALS[self._fault]
            raise Failure(code, "made up: the write was carried out", reason=reason)
        if self.dead or self._fault == "lost":
            raise aiohttp.ClientConnectionError("the answer is lost")

    async def watched(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The lines of a watch, until it is cut or the operator dies."""
        before: deque[bytes] = deque(maxlen=REPLAYED)
        loop = asyncio.get_running_loop()
        began = loop.time()
        reading = asyncio.ensure_future(anext(lines))
        try:
            while not self.dead:
                await asyncio.wait({reading}, timeout=self.cut_seconds or ARMED_SECONDS)
                if reading.done():
                    line = reading.result()
                    reading = asyncio.ensure_future(anext(lines))
                    yield line
                    if self.replay and b'"BOOKMARK"' not in line[:40]:
                        before.append(line)
                        for old in list(before):
                            yield old
                            self.suffered += 1
                if self.cut_seconds is not None and loop.time() > began + self.cut_seconds:
                    self.suffered += 1
                    raise aiohttp.ClientConnectionError("the watch is cut")
        except StopAsyncIteration:
            return
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _counted(request: Request) -> bool:
    match = NAMESPACE.match(request.path)
    return request.method in WRITES and match is not None and match[2] not in UNCOUNTED
