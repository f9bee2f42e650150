"""Requests to the API server: JSON in, JSON out, a deadline on each, typed errors.

kubernetes.aio brings credentials, TLS and transport. Its models stay out: building them costs more than everything else
that the operator does with an object.

The answers' Date header keeps `now()` at the API server's time, so that no decision depends on this machine's clock.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config as settings
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from qwen35_operator.kube.errors import ApiError, Unavailable, error
from qwen35_operator.kube.kubeconfig import problem
from qwen35_operator.settings import SettingsRefused

logger = logging.getLogger(__name__)

DEADLINE = 15.0
"""Seconds that a request may take, waits and repetitions included."""
READ_IDLE = 75.0
"""Seconds without a byte after which a watch is begun anew: its connection may be dead."""
IN_POD = "KUBERNETES_SERVICE_HOST"
CONNECTIONS = 0
"""No limit: every watch holds one for good, and the workers bound what comes on top."""
PLAIN = "application/json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Accept header: only an object's metadata."""
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

type Json = dict[str, Any]
type Query = Mapping[str, str | int]
type Seen = Callable[[str, str, int], None]
"""Called with verb, resource and status code of every answer."""


class Client(Protocol):
    """What reconciling needs of the API server."""

    def now(self) -> datetime: ...

    async def get(self, path: str, query: Query | None = None, *, accept: str = PLAIN) -> Json: ...

    async def post(self, path: str, body: Mapping[str, Any], query: Query | None = None) -> Json: ...

    async def patch(self, path: str, body: Any, kind: str) -> Json: ...  # noqa: ANN401  # a mapping or a list

    async def put(self, path: str, body: Mapping[str, Any]) -> Json: ...

    async def delete(self, path: str, body: Mapping[str, Any]) -> Json: ...


class RestClient:
    """The API server, over HTTP."""

    def __init__(self, configuration: Configuration, seen: Seen = lambda verb, resource, code: None) -> None:
        configuration.connection_pool_maxsize = CONNECTIONS
        configuration.retries = None  # False counts as a number there, and its repetitions are of writes too
        # Once, here: aiohttp would look for it, and into ~/.netrc, by two trips to a thread before each request.
        configuration.client_session_kwargs = {"trust_env": False}
        configuration.proxy = configuration.proxy or _proxy(configuration.host)
        self._configuration = configuration
        self._rest = RESTClientObject(configuration)
        self._offset = timedelta(0)
        self._seen = seen

    def now(self) -> datetime:
        """The API server's time, as well as its latest answer told it."""
        return datetime.now(UTC) + self._offset

    async def get(self, path: str, query: Query | None = None, *, accept: str = PLAIN) -> Json:
        return await self._json("GET", path, query=query, accept=accept)

    async def post(self, path: str, body: Mapping[str, Any], query: Query | None = None) -> Json:
        return await self._json("POST", path, body, query)

    async def patch(self, path: str, body: Any, kind: str) -> Json:  # noqa: ANN401  # a mapping or a list
        return await self._json("PATCH", path, body, content=kind)

    async def put(self, path: str, body: Mapping[str, Any]) -> Json:
        return await self._json("PUT", path, body)

    async def delete(self, path: str, body: Mapping[str, Any]) -> Json:
        return await self._json("DELETE", path, body)

    @asynccontextmanager
    async def lines(self, path: str, query: Query, *, accept: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a watch, until it ends or nothing has come for READ_IDLE seconds. Raises ApiError."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE, sock_read=READ_IDLE)
        try:
            response = await self._send("GET", path, None, query, PLAIN, accept, limit)
            try:
                if response.status != 200:
                    raise _refused(response.status, await response.read())
                yield _lines(response.content)
            finally:
                response.close()
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise Unavailable(0, f"{path}: {_text(problem)}") from problem

    async def close(self) -> None:
        await self._rest.close()

    async def _json(
        self,
        verb: str,
        path: str,
        body: object = None,
        query: Query | None = None,
        content: str = PLAIN,
        accept: str = PLAIN,
    ) -> Json:
        """One request. Reads are repeated within the deadline; a write is the caller's to repeat, after a new look."""
        limit = aiohttp.ClientTimeout()  # none of its own: two that end at once hide each other
        try:
            async with asyncio.timeout(DEADLINE):
                for wait in (0.1, 0.5, 2.0, None):
                    try:
                        return await self._once(verb, path, body, query or {}, content, accept, limit)
                    except Unavailable:
                        if verb != "GET" or wait is None:
                            raise
                    await asyncio.sleep(wait)
        except TimeoutError as problem:
            raise Unavailable(0, f"{verb} {path}: no answer within {DEADLINE:g} s") from problem
        raise AssertionError("the last repetition raises")

    async def _once(
        self,
        verb: str,
        path: str,
        body: object,
        query: Query,
        content: str,
        accept: str,
        limit: aiohttp.ClientTimeout,
    ) -> Json:
        try:
            response = await self._send(verb, path, body, query, content, accept, limit)
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise Unavailable(0, f"{verb} {path}: {_text(problem)}") from problem
        if response.status >= 300:
            raise _refused(response.status, raw)
        try:
            answer: Json = json.loads(raw)
        except ValueError as problem:
            raise Unavailable(response.status, f"{verb} {path}: the answer is not JSON") from problem
        return answer

    async def _send(
        self,
        verb: str,
        path: str,
        body: object,
        query: Query,
        content: str,
        accept: str,
        limit: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        url = f"{self._configuration.host}{path}{f'?{urlencode(query)}' if query else ''}"
        headers = {"Accept": accept, "Content-Type": content, "User-Agent": "qwen35-operator"}
        for auth in (await self._configuration.auth_settings()).values():
            headers[auth["key"]] = auth["value"]  # type: ignore[index]  # declared as a mapping of objects
        answer = await self._rest.request(verb, url, headers=headers, body=body, _request_timeout=limit)
        response: aiohttp.ClientResponse = answer.response
        self._seen(verb, _resource(path), response.status)
        if (date := response.headers.get("Date")) is not None:
            self._offset = _offset(date, self._offset)
        return response


async def connect(kubeconfig: str | None, seen: Seen, context: str | None = None) -> RestClient:
    """A client with the credentials of the kubeconfig's context, or of the pod that this runs in. Raises SettingsRefused."""
    configuration = Configuration()
    try:
        if kubeconfig is None and context is None and IN_POD in os.environ:
            settings.load_incluster_config(client_configuration=configuration)
        elif (wrong := problem(kubeconfig)) is not None:
            raise SettingsRefused(f"no credentials for the API server: {wrong}")
        else:
            await settings.load_kube_config(config_file=kubeconfig, context=context, client_configuration=configuration)
    except settings.ConfigException as error:
        fix = "Name a kubeconfig by --kubeconfig, or run in a pod with a ServiceAccount"
        raise SettingsRefused(f"no credentials for the API server: {error}. {fix}") from error
    return RestClient(configuration, seen)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines, however long: a ConfigMap of 1 MiB can take six times as much as JSON, and aiohttp's own end earlier."""
    parts: list[bytes] = []
    with suppress(aiohttp.ServerTimeoutError):  # silence is no fault: where nothing happens, not even bookmarks come
        async for chunk in content.iter_any():
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                yield b"".join((*parts, end))
                parts.clear()
            parts.append(rest)


def _proxy(url: str) -> str | None:
    """What the environment names for the API server, as other clients go by it."""
    server = urlsplit(url)
    return None if proxy_bypass(server.hostname or "") else getproxies().get(server.scheme)


def _offset(date: str, before: timedelta) -> timedelta:
    """What is to be added to this machine's clock. Whole seconds: the header has no more, and small steps are noise."""
    try:
        shift = parsedate_to_datetime(date) - datetime.now(UTC)
    except (ValueError, TypeError):  # no date, or one without a zone
        return before
    return timedelta(0) if abs(shift) < timedelta(seconds=2) else timedelta(seconds=round(shift.total_seconds()))


def _refused(status: int, raw: bytes) -> ApiError:
    try:
        answer = json.loads(raw)
        return error(status, str(answer.get("message", "")), answer.get("details"))
    except (ValueError, AttributeError):
        return error(status, raw[:200].decode(errors="replace"))


def _resource(path: str) -> str:
    """The plural in a path, for metrics: names would be without end."""
    parts = path.strip("/").split("/")
    rest = parts[3:] if parts[0] == "apis" else parts[2:]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    return "/".join([rest[0], *rest[2:3]]) if rest else path


def _text(problem: BaseException) -> str:
    return str(problem) or type(problem).__name__
