"""What kopf does for the operator, without kopf: lists and watches trainings, and passes on the events.

Used in the place of `handlers.follow`. That kopf does the same is the matter of tests/operator/test_handlers.py and of the
stories on the real API server.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from qwen35_operator import handlers
from qwen35_operator.kube.api_errors import ApiError, Forbidden, Gone, NotFound
from qwen35_operator.kube.client import PLAIN, RestClient
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.kube.trainings import Trainings, TrainingWatch
from qwen35_operator.kube.watch_stream import watch_events

RECONNECT_SECONDS = 0.1
ERROR_SECONDS = 1.0


async def follow(
    kubeconfig: str | None,  # the client has its credentials
    client: RestClient,
    trainings: Trainings,
    changed: Callable[[TrainingKey], None],
    pace: ListPace,  # it lists everything in one page
) -> None:
    """Keep `trainings` equal to the trainings in the cluster, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for watch in trainings.watches:
            tasks.create_task(_follow_in(watch, client, trainings, changed))


async def _follow_in(
    watch: TrainingWatch, client: RestClient, trainings: Trainings, changed: Callable[[TrainingKey], None]
) -> None:
    def apply(event: Any) -> None:
        watch.answered()
        watch.errors.works()
        handlers.apply_event(event, trainings, changed)

    while True:
        await handlers.wait_until_watchable(client, watch)
        await _feed(client, watch, apply)
        await asyncio.sleep(handlers.RESTART_SECONDS)


async def _feed(client: RestClient, watch: TrainingWatch, apply: Callable[[Any], None]) -> None:
    """Follow one namespace, or all, until the permission or the definition is gone."""
    path, version = TRAINING.path(watch.namespace), ""
    while True:
        try:
            if not version:
                page = await client.get(path)
                for raw in page["items"]:
                    apply({"type": None, "object": raw})
                version = page["metadata"]["resourceVersion"]
                watch.listed = True
            async with watch_events(client, path, {}, version, accept=PLAIN) as events:
                async for event in events:
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        apply(event)
            await asyncio.sleep(RECONNECT_SECONDS)
        except Gone:
            version = ""
        except (Forbidden, NotFound):
            return
        except ApiError:
            await asyncio.sleep(ERROR_SECONDS)
