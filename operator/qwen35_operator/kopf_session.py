"""The HTTP session that kopf uses: its answers are read by `shallow_json`, so that no object can end kopf's list or watch.

    login ─► ConnectionInfo ─► ShallowSession ─► kopf: list ─► ShallowResponse.json
                                                       watch ─► ShallowResponse.content.iter_chunked

kopf lets a login handler return a session instead of credentials, and reads answers by these two methods only.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf
from aiohttp.connector import Connection

from qwen35_operator.kube import shallow_json


@dataclass(frozen=True, kw_only=True)
class ShallowSession(kopf.AiohttpSession):
    """A session with the credentials from which it was made.

    Two sessions are equal if their credentials are, so that kopf recognises credentials that the API server has refused.
    """

    aiohttp_session: aiohttp.ClientSession = field(compare=False)
    credentials: kopf.ConnectionInfo

    @classmethod
    def open(cls, credentials: kopf.ConnectionInfo) -> "ShallowSession":
        """Open a session on the running event loop, as kopf would open one with these credentials."""
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=credentials.as_ssl_context()),
            headers=credentials.as_http_headers(),
            proxy=credentials.proxy_url,
            trust_env=credentials.trust_env,
            response_class=ShallowResponse,
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
    """A response whose JSON is shallow, whether it is read as a whole or in lines."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Begin to receive the response. Its content yields whole lines of shallow JSON."""
        await super().start(connection)
        self.content = _ShallowContent(self.content)  # type: ignore[assignment]  # has all that kopf and aiohttp use
        return self

    async def json(self, **_: Any) -> Any:  # noqa: ANN401  # JSON
        """Return the whole body as shallow JSON."""
        return shallow_json.loads(await self.read())


class _ShallowContent:
    """A stream of bytes of which only `iter_chunked` differs: it yields lines of shallow JSON."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # an attribute of the stream
        return getattr(self._content, name)

    def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield the lines of the stream, of any length. size: maximum number of bytes that are read in one step."""
        return shallow_json.shallow_lines(self._content.iter_chunked(size))
