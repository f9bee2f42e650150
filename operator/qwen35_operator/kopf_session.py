"""The HTTP session that kopf uses. It replaces parts of objects that are nested too deeply for kopf to parse or copy.

    login ─► ConnectionInfo ─► ShallowSession ─► kopf: list ─► ShallowResponse.json
                                                       watch ─► ShallowResponse.content.iter_chunked

A single such object would end kopf's list or watch (`shallow_json`). kopf lets a login handler return a session instead
of credentials. kopf reads answers only by `json` and `iter_chunked`.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf
from aiohttp.connector import Connection
from yarl import URL

from qwen35_operator.kube import shallow_json
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.text_lines import lines
from qwen35_operator.kube.trainings import condensed

MAX_LINE_BYTES = 64 * 1024
"""Size of the line of a watch from which on the training is condensed before kopf parses the line."""


@dataclass(frozen=True, kw_only=True)
class ShallowSession(kopf.AiohttpSession):
    """A session that remembers the credentials with which it was opened.

    Two sessions are equal if their credentials are equal, so that kopf recognises refused credentials.
    """

    aiohttp_session: aiohttp.ClientSession = field(compare=False)
    credentials: kopf.ConnectionInfo

    @classmethod
    def open(
        cls, credentials: kopf.ConnectionInfo, answered: Callable[[URL], object], pace: ListPace
    ) -> "ShallowSession":
        """Open a session on the running event loop, with the options that kopf uses for these credentials.

        answered: called with the URL of each request whose answer is not an error. pace: the pace of kopf's lists: the
        requests with a limit. Their answers are parsed after the pause, because parsed objects take much memory.
        """

        class Response(ShallowResponse):
            async def start(self, connection: Connection) -> aiohttp.ClientResponse:
                self._began = time.monotonic()
                response = await super().start(connection)
                if self.ok:
                    answered(self.url)
                return response

            async def json(self, **options: Any) -> Any:  # noqa: ANN401  # JSON
                if self.ok and "limit" in self.url.query:
                    await self.read()
                    await pace.pause(time.monotonic() - self._began)
                return await super().json(**options)

        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=credentials.as_ssl_context()),
            headers=credentials.as_http_headers(),
            proxy=credentials.proxy_url,
            trust_env=credentials.trust_env,
            response_class=Response,
        )
        return cls(
            server=credentials.server,
            priority=credentials.priority,
            default_namespace=credentials.default_namespace,
            expiration=credentials.expiration,
            aiohttp_session=session,
            credentials=credentials,
        )


class ShallowResponse(aiohttp.ClientResponse):
    """A response in which `shallow_json` replaces parts of JSON that are nested too deeply.

    The response can be read as a whole (`json`) or line by line (`content.iter_chunked`).
    """

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Begin to receive the response. `content.iter_chunked` then yields whole lines, without parts nested too deeply."""
        await super().start(connection)
        self.content = _ShallowContent(self.content)  # type: ignore[assignment]  # has all that kopf and aiohttp use
        return self

    async def json(self, **_: Any) -> Any:  # noqa: ANN401  # JSON
        """Return the whole body as parsed JSON, in which TOO_DEEP replaces parts that are nested too deeply.

        In a list, each training is `condensed`, because kopf keeps a whole page.
        """
        if "limit" in self.url.query:
            return shallow_json.loads_list(await self.read(), condensed)
        return shallow_json.loads(await self.read())


class _ShallowContent:
    """Wraps a stream of bytes. `iter_chunked` yields lines of shallow JSON; all else is the stream's."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # an attribute of the stream
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield the lines of the stream, of any length. size: maximum number of bytes to read in one step.

        In a long line, the training is `condensed`: kopf parses lines faster than the operator uses them, and so may keep many.
        """
        async for line in lines(self._content.iter_chunked(size)):
            yield shallow_json.shallow(line) if len(line) <= MAX_LINE_BYTES else _condensed_event(line)


def _condensed_event(line: bytes) -> bytes:
    event = shallow_json.loads(line)
    if event["type"] != "ERROR":
        event["object"] = condensed(event["object"])
    return json.dumps(event).encode() + b"\n"
