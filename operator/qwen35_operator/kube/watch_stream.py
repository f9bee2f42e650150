"""One watch request to the API server, as a stream of events."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from qwen35_operator.kube import shallow_json
from qwen35_operator.kube.answers import watch_event
from qwen35_operator.kube.api_errors import ApiError, Gone, Unexpected
from qwen35_operator.kube.client import JsonObject, Query, RestClient

SERVER_TIMEOUT_SECONDS = 290
"""Time after which the API server ends a watch. The next watch may then reach an API server that was started later."""


@asynccontextmanager
async def watch_events(
    client: RestClient, path: str, selector: Query, version: str, *, accept: str
) -> AsyncIterator[AsyncIterator[JsonObject]]:
    """Context manager: open a watch, and yield an iterator of the events, bookmarks included.

    The iterator ends when the API server ends the watch, or when nothing has arrived for READ_IDLE_SECONDS.
    version: the resourceVersion from which to watch. selector: labelSelector or fieldSelector. accept: media type of
    the events. Opening and iterating raise Gone if the version is too old, and ApiError for any other error.
    """
    query: Query = {
        "watch": "true",
        **selector,
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": SERVER_TIMEOUT_SECONDS,
    }
    async with client.lines(path, query, accept=accept) as lines:
        yield _events(path, lines)


async def _events(path: str, lines: AsyncIterator[bytes]) -> AsyncIterator[JsonObject]:
    async for line in lines:
        try:
            event = watch_event(path, shallow_json.loads(line))
        except ValueError as problem:  # not an event that was cut: `lines` leaves out a line without an end
            raise Unexpected(200, f"{path}: an event is not JSON: {line[:200]!r}") from problem
        if event["type"] == "ERROR":
            code, message = event["object"].get("code", 0), event["object"].get("message", "")
            raise Gone(code, message) if code == 410 else ApiError(code, message)
        yield event
