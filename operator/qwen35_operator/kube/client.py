"""Requests to the API server: JSON in, JSON out, with a deadline and typed errors.

kubernetes.aio provides credentials, TLS and transport. Its models are not used: building them costs more than
everything else that the operator does with an object.

The Date header of the answers keeps `now()` at the API server's time, so no decision depends on this machine's clock.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config as settings
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from qwen35_operator.kube import shallow_json
from qwen35_operator.kube.api_errors import ApiError, TooLarge, Unavailable, api_error
from qwen35_operator.kube.kubeconfig import problem, uses_pod
from qwen35_operator.kube.text_lines import lines
from qwen35_operator.operator_settings import SettingsRefused

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_SECONDS = 15.0
"""Maximum time of a request, including waits and retries."""
READ_IDLE_SECONDS = 75.0
"""Time without a byte after which a watch ends, because its connection may be dead. The caller opens another one."""
MAX_ANSWER_BYTES = 16 * 2**20
"""Maximum size of an answer. One object has at most 10 MB: a ConfigMap of 1 MiB whose characters all have to be escaped."""
GET_RETRY_WAITS_SECONDS = (0.1, 0.5, 2.0)
MAX_RETRY_AFTER_SECONDS = 60.0
"""Maximum time for which the operator waits when the API server requests it. API priority and fairness requests seconds."""
NO_CONNECTION_LIMIT = 0
"""aiohttp's value for an unlimited number of connections. The operator needs no limit, because it has few watches and
workers."""
PLAIN = "application/json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Value of the header Accept that requests only the metadata of objects."""
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Media type of a server-side apply. JSON is valid YAML."""

type JsonObject = dict[str, Any]
type Query = Mapping[str, str | int]
type RequestObserver = Callable[[str, str, int], None]
"""Function that is called after every answer, with the verb, the resource and the HTTP status code."""


class Client(Protocol):
    """The interface of a client of the API server. `RestClient` implements this interface."""

    def now(self) -> datetime: ...

    async def get(self, path: str, query: Query | None = None, *, accept: str = PLAIN) -> JsonObject: ...

    async def post(self, path: str, body: Mapping[str, Any], query: Query | None = None) -> JsonObject: ...

    async def patch(
        self,
        path: str,
        body: Any,  # noqa: ANN401  # a mapping or a list
        kind: str,
        query: Query | None = None,
    ) -> JsonObject: ...

    async def put(self, path: str, body: Mapping[str, Any]) -> JsonObject: ...

    async def delete(self, path: str, body: Mapping[str, Any]) -> JsonObject: ...


@dataclass(frozen=True)
class _Request:
    """A request to the API server."""

    verb: str
    path: str
    body: object = None
    query: Query | None = None
    content: str = PLAIN
    """Media type of the body."""
    accept: str = PLAIN
    """Media type of the answer."""
    each: Callable[[Any], Any] | None = None
    """Of a list: called with each item as it is parsed. The result takes the item's place in the answer."""
    max_bytes: int = MAX_ANSWER_BYTES
    """Maximum size of the answer."""


class RestClient:
    """A client of the API server over HTTP."""

    def __init__(
        self, configuration: Configuration, observer: RequestObserver = lambda verb, resource, code: None
    ) -> None:
        configuration.connection_pool_maxsize = NO_CONNECTION_LIMIT
        configuration.retries = None  # False would count as a number, and the library also retries writes
        # The proxy is read once, here: aiohttp would read it, and ~/.netrc, in two thread calls before each request.
        configuration.client_session_kwargs = {"trust_env": False}
        configuration.proxy = configuration.proxy or _proxy(configuration.host)
        self._configuration = configuration
        self._rest = RESTClientObject(configuration)
        self._offset = timedelta(0)
        self._observer = observer

    def now(self) -> datetime:
        """Return the API server's time: this machine's clock, corrected by the Date header of the latest answer."""
        return datetime.now(UTC) + self._offset

    async def get(self, path: str, query: Query | None = None, *, accept: str = PLAIN) -> JsonObject:
        return await self._json(_Request("GET", path, query=query, accept=accept))

    async def get_list(
        self,
        path: str,
        query: Query,
        each: Callable[[Any], Any],
        *,
        accept: str = PLAIN,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> JsonObject:
        """Return a list with each(item) in place of every item. The items are parsed one at a time (`shallow_json.loads_list`).

        Raises TooLarge if the answer has more than `max_bytes`.
        """
        request = _Request("GET", path, query=query, accept=accept, each=each, max_bytes=max_bytes)
        return await self._json(request)

    async def post(self, path: str, body: Mapping[str, Any], query: Query | None = None) -> JsonObject:
        return await self._json(_Request("POST", path, body, query))

    async def patch(
        self,
        path: str,
        body: Any,  # noqa: ANN401  # a mapping or a list
        kind: str,
        query: Query | None = None,
    ) -> JsonObject:
        return await self._json(_Request("PATCH", path, body, query, content=kind))

    async def put(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        return await self._json(_Request("PUT", path, body))

    async def delete(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        return await self._json(_Request("DELETE", path, body))

    @asynccontextmanager
    async def lines(self, path: str, query: Query, *, accept: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Context manager: open a watch, and yield an iterator of the lines of the answer.

        The iterator ends when the API server ends the watch, or when nothing has arrived for READ_IDLE_SECONDS. accept:
        media type of the lines. Raises ApiError if the API server refuses the watch or the connection fails.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_SECONDS, sock_read=READ_IDLE_SECONDS)
        try:
            response = await self._send(_Request("GET", path, query=query, accept=accept), limit)
            try:
                if response.status != 200:
                    raise _refused(response, await response.read())
                yield _lines(response.content)
            finally:
                response.close()
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise Unavailable(0, f"{path}: {_text(problem)}") from problem

    async def close(self) -> None:
        await self._rest.close()

    async def _json(self, request: _Request) -> JsonObject:
        """Send a request and return the answer. Raises ApiError if the request fails.

        If the API server is unavailable, a GET is repeated within REQUEST_TIMEOUT_SECONDS, unless the API server
        requests a longer wait, which the error then contains. A write is not repeated: it may have been carried out, so
        the caller must decide again.
        """
        limit = aiohttp.ClientTimeout()  # no limit by aiohttp: two limits that expire together would hide each other
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS) as deadline:
                for wait in (*GET_RETRY_WAITS_SECONDS, None):
                    try:
                        return await self._once(request, limit)
                    except Unavailable as error:
                        if request.verb != "GET" or wait is None or _is_after(error.retry_after, deadline):
                            raise
                        wanted = error.retry_after
                    await asyncio.sleep(max(wait, wanted))
        except TimeoutError as problem:
            message = f"{request.verb} {request.path}: no answer within {REQUEST_TIMEOUT_SECONDS:g} s"
            raise Unavailable(0, message) from problem
        raise AssertionError("the last try raises")

    async def _once(self, request: _Request, limit: aiohttp.ClientTimeout) -> JsonObject:
        try:
            response = await self._send(request, limit)
            raw = await _bounded(response, request.path, request.max_bytes)
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise Unavailable(0, f"{request.verb} {request.path}: {_text(problem)}") from problem
        if response.status >= 300:
            raise _refused(response, raw)
        try:
            answer = shallow_json.loads(raw) if request.each is None else shallow_json.loads_list(raw, request.each)
        except ValueError as problem:
            message = f"{request.verb} {request.path}: the answer is not JSON"
            raise Unavailable(response.status, message) from problem
        if not isinstance(answer, dict):
            raise Unavailable(response.status, f"{request.verb} {request.path}: the answer is not a JSON object")
        return answer

    async def _send(self, request: _Request, limit: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        query = f"?{urlencode(request.query)}" if request.query else ""
        url = f"{self._configuration.host}{request.path}{query}"
        headers = {"Accept": request.accept, "Content-Type": request.content, "User-Agent": "qwen35-operator"}
        headers |= await self._credentials()
        answer = await self._rest.request(request.verb, url, headers=headers, body=request.body, _request_timeout=limit)
        response: aiohttp.ClientResponse = answer.response
        self._observer(request.verb, _resource(request.path), response.status)
        if (date := response.headers.get("Date")) is not None:
            self._offset = _offset(date, self._offset)
        return response

    async def _credentials(self) -> dict[str, str]:
        """Return the headers with the credentials. Raises Unavailable if their file cannot be read now, or their plugin fails."""
        try:
            headers = await self._configuration.auth_settings()
        except (OSError, settings.ConfigException) as problem:
            raise Unavailable(0, f"no credentials: {_text(problem)}") from problem
        # The library declares a mapping of objects.
        return {auth["key"]: auth["value"] for auth in headers.values()}  # type: ignore[index]


async def _bounded(response: aiohttp.ClientResponse, path: str, max_bytes: int) -> bytes:
    """Return the body of an answer. Raises TooLarge if it has more than `max_bytes`."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            response.close()
            raise TooLarge(response.status, f"{path}: the answer has more than {max_bytes} bytes")
    return b"".join(chunks)


async def connect(kubeconfig: str | None, observer: RequestObserver, context: str | None = None) -> RestClient:
    """Return a client with the credentials of the kubeconfig's context, or of the pod in which this process runs.

    kubeconfig: path of the file; None for the files that kubectl would read. context: None for the current context. If
    both are None, KUBECONFIG is not set, and this process runs in a pod, the client has the pod's credentials. observer:
    called after every answer. Raises SettingsRefused if the credentials are missing or invalid.
    """
    configuration = Configuration()
    try:
        if uses_pod(kubeconfig, context):
            settings.load_incluster_config(client_configuration=configuration)
        elif (fault := problem(kubeconfig)) is not None:
            raise SettingsRefused(f"no credentials for the API server: {fault}")
        else:
            loader = await settings.load_kube_config(
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
            configuration.refresh_api_key_hook = _renewing(loader)  # type: ignore[assignment]  # declared as None
    except settings.ConfigException as error:
        fix = "Name a kubeconfig with --kubeconfig, or run in a pod with a ServiceAccount"
        raise SettingsRefused(f"no credentials for the API server: {error}. {fix}") from error
    return RestClient(configuration, observer)


def _renewing(loader: Any) -> Callable[[Configuration], Awaitable[None]]:  # noqa: ANN401  # untyped library
    """Return the function that gets a new token when that of the kubeconfig's exec plugin has expired. Called before each request.

    Tokens of clouds live for 15 to 60 minutes. loader: the kubeconfig, as loaded.
    """
    lock = asyncio.Lock()

    async def renew(configuration: Configuration) -> None:
        if not hasattr(loader, "exec_plugin_expiry"):
            return  # no plugin, or a token that does not expire
        async with lock:
            await loader.load_from_exec_plugin()  # returns immediately unless the token has expired
        configuration.api_key["BearerToken"] = loader.token

    return renew


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines of any length. The iterator ends without an error after READ_IDLE_SECONDS of silence.

    A line that is cut off at the end is left out. aiohttp limits the length of a line when it reads by lines. A ConfigMap of 1 MiB can be
    six times as long in JSON.
    """
    # Silence is not an error: without changes there may be no bookmarks either.
    with suppress(aiohttp.ServerTimeoutError):
        async for line in lines(content.iter_any()):
            if line.endswith(b"\n"):
                yield line[:-1]


def _proxy(url: str) -> str | None:
    """Return the proxy that environment variables such as HTTPS_PROXY name for the API server; None if they name none.

    url: the URL of the API server.
    """
    server = urlsplit(url)
    return None if proxy_bypass(server.hostname or "") else getproxies().get(server.scheme)


def _offset(date: str, before: timedelta) -> timedelta:
    """Return how far the API server's clock is ahead of this machine's clock.

    date: the Date header of an answer. The result is in whole seconds, like the header. A difference below two seconds
    counts as zero. before: the previous result, which is returned if the header is not a valid date.
    """
    try:
        shift = parsedate_to_datetime(date) - datetime.now(UTC)
    except (ValueError, TypeError):  # not a date, or one without a time zone
        return before
    return timedelta(0) if abs(shift) < timedelta(seconds=2) else timedelta(seconds=round(shift.total_seconds()))


def _refused(response: aiohttp.ClientResponse, raw: bytes) -> ApiError:
    status, wait = response.status, _seconds(response.headers.get("Retry-After", ""))
    try:
        answer = shallow_json.loads(raw)
        return api_error(status, str(answer.get("message", "")), answer.get("details"), wait)
    except (ValueError, AttributeError):
        return api_error(status, raw[:200].decode(errors="replace"), retry_after=wait)


def _is_after(seconds: float, deadline: asyncio.Timeout) -> bool:
    """Return whether the deadline will be over in this number of seconds."""
    when = deadline.when()
    return when is not None and asyncio.get_running_loop().time() + seconds >= when


def _seconds(retry_after: str) -> float:
    """Return the seconds in the header Retry-After, at most MAX_RETRY_AFTER_SECONDS; 0 if it has no number of seconds."""
    return min(float(retry_after), MAX_RETRY_AFTER_SECONDS) if retry_after.isdecimal() else 0.0


def _resource(path: str) -> str:
    """Return the plural and the subresource in a URL path, such as "rayjobs" or "qwen35trainings/status".

    The result is the value of a metric's label. Names of objects are left out, because they would give the label any
    number of values.
    """
    parts = path.strip("/").split("/")
    rest = parts[3:] if parts[0] == "apis" else parts[2:]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    return "/".join([rest[0], *rest[2:3]]) if rest else path


def _text(problem: BaseException) -> str:
    return str(problem) or type(problem).__name__
