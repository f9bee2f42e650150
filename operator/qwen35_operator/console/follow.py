"""One training as it changes.

    list by name ─► yield ─► watch from there ─► yield …
      ▲                          │ 410 Gone: the place is lost
      └──────────────────────────┘ no answer, refused: say so, wait        cut, silent: watch on

waits on       unblocked by                            deadline
an event       a change, or a bookmark each minute     READ_IDLE seconds, then again
the next try   time                                    LONGEST_WAIT seconds
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Final

from qwen35_operator.console.lookup import named, refused, training
from qwen35_operator.kube.client import PLAIN, Json, Query, RestClient
from qwen35_operator.kube.errors import ApiError, Forbidden, Gone, NotFound
from qwen35_operator.kube.kinds import TRAINING

FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0
SERVER_SECONDS: Final = 290
REFUSALS: Final = 5
"""In a row, after which they are believed: an API server that has just started refuses everybody, and knows no kinds."""


@dataclass(frozen=True)
class Trouble:
    """The cluster cannot be asked at the moment; says why. What was seen before stays."""

    text: str


async def follow(client: RestClient, namespace: str, name: str) -> AsyncGenerator[Json | Trouble | None, None]:
    """The training's object as it is, then at each change; None once it is gone, and nothing after that.

    Raises NotShown where there is no such training at first, and for what trying again cannot change.
    """
    raw, version = await training(client, namespace, name)
    uid, wait, refusals = raw["metadata"]["uid"], FIRST_WAIT, 0
    yield raw
    while True:
        try:
            if not version:
                found, version = await named(client, namespace, name)
                if found is None or found["metadata"]["uid"] != uid:
                    yield None
                    return
                refusals = 0
                yield found
            async for event in _events(client, namespace, name, version):
                wait, refusals = FIRST_WAIT, 0
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    yield None
                    return
                if event["type"] != "BOOKMARK":
                    yield event["object"]
        except Gone:
            version = ""
        except ApiError as error:
            refusals = refusals + 1 if isinstance(error, Forbidden | NotFound) else 0
            if refusals == REFUSALS:
                raise refused(error, "watch", TRAINING, namespace) from error
            yield Trouble(f"The API server does not answer: {error.message}. Trying on")
            version, wait = "", min(2 * wait, LONGEST_WAIT)  # the list tells that it is over
        await asyncio.sleep(wait)


async def _events(client: RestClient, namespace: str, name: str, version: str) -> AsyncIterator[Json]:
    """Events from the version on, until the stream ends. Raises ApiError."""
    query: Query = {
        "watch": "true",
        "fieldSelector": f"metadata.name={name}",
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": SERVER_SECONDS,
    }
    async with client.lines(TRAINING.path(namespace), query, accept=PLAIN) as lines:
        async for line in lines:
            try:
                event: Json = json.loads(line)
            except ValueError:
                return  # cut in the middle of an event: it comes again
            if event["type"] == "ERROR":
                code, message = event["object"].get("code", 0), event["object"].get("message", "")
                raise Gone(code, message) if code == 410 else ApiError(code, message)
            yield event
