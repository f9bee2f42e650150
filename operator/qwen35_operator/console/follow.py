"""Follows one training as it changes.

    list by name ─► yield ─► watch from there ─► yield …
      ▲                          │ 410 Gone: the version is too old
      └──────────────────────────┘ no answer, refused: report it, back off        connection cut, silent: continue the watch

waits on       unblocked by                            deadline
an event       a change, or a bookmark each minute     READ_IDLE_SECONDS, then a new watch
the next try   time                                    MAX_BACKOFF_SECONDS
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from qwen35_operator.console.lookup import find, refused, training
from qwen35_operator.kube.api_errors import ApiError, Forbidden, Gone, NotFound, Unauthorized
from qwen35_operator.kube.client import PLAIN, JsonObject, RestClient
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.watch_stream import watch_events
from qwen35_trainer.contract.retry import backoff_seconds

FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 10.0
MAX_REFUSALS: Final = 5
"""Number of refused requests in a row after which the command ends. A few refusals are normal: an API server that has
just started refuses every request for a while."""


@dataclass(frozen=True)
class ConnectionProblem:
    """The cluster does not answer at the moment. The last known state remains valid. text: the reason, for the user."""

    text: str


async def follow(
    client: RestClient, namespace: str, name: str
) -> AsyncGenerator[JsonObject | ConnectionProblem | None, None]:
    """Yield the training's object, and again after each change. After the deletion of the training, yield None and end.

    While the API server does not answer, yield a ConnectionProblem for each failed request. Raises NotShown at the
    start if the training does not exist or cannot be read, and later after MAX_REFUSALS refused requests in a row.
    """
    raw, version = await training(client, namespace, name)
    uid, failures, refusals = raw["metadata"]["uid"], 0, 0
    selector = {"fieldSelector": f"metadata.name={name}"}
    yield raw
    while True:
        try:
            if not version:
                current, version = await find(client, namespace, name)
                if current is None or current["metadata"]["uid"] != uid:
                    yield None
                    return
                refusals = 0
                yield current
            async with watch_events(client, TRAINING.path(namespace), selector, version, accept=PLAIN) as events:
                async for event in events:
                    failures, refusals = 0, 0
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        yield None
                        return
                    if event["type"] != "BOOKMARK":
                        yield event["object"]
        except Gone:
            version = ""
        except ApiError as error:
            refusals = refusals + 1 if isinstance(error, Unauthorized | Forbidden | NotFound) else 0
            if refusals == MAX_REFUSALS:
                raise refused(error, "watch", TRAINING, namespace) from error
            yield ConnectionProblem(f"The API server does not answer: {error.message}. Trying again")
            version, failures = "", failures + 1  # the next list shows that the problem is over
        await asyncio.sleep(backoff_seconds(failures + 1, first=FIRST_BACKOFF_SECONDS, maximum=MAX_BACKOFF_SECONDS))
