"""One watch request to the API server, as a stream of events."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from qwen35_operator.kube.api_errors import ApiError, Gone
from qwen35_operator.kube.client import JsonObject, Query, RestClient

SERVER_TIMEOUT_SECONDS = 290
"""The API server ends a watch after this time, so that connections move to API servers that started later."""


@asynccontextmanager
async def watch_events(
    client: RestClient, path: str, selector: Query, version: str, *, accept: str
) -> AsyncIterator[AsyncIterator[JsonObject]]:
    """Context manager: open a watch from resourceVersion `version` on. Gives an iterator of its events, Bookmarks included.

    The iterator ends with the stream. selector: labelSelector or fieldSelector. accept: the media type of the answer.
    Raises Gone if the version is too old to continue from, and ApiError for any other refusal.
    """
    query: Query = {
        "watch": "true",
        **selector,
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": SERVER_TIMEOUT_SECONDS,
    }
    async with client.lines(path, query, accept=accept) as lines:
        yield _events(lines)


async def _events(lines: AsyncIterator[bytes]) -> AsyncIterator[JsonObject]:
    async for line in lines:
        try:
            event: JsonObject = json.loads(line)
        except ValueError:
            return  # the connection was cut within an event, which the next watch repeats
        if event["type"] == "ERROR":
            code, message = event["object"].get("code", 0), event["object"].get("message", "")
            raise Gone(code, message) if code == 410 else ApiError(code, message)
        yield event
