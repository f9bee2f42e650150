"""Passes the events of trainings, which the library kopf receives, to the store of trainings and to the work queue.

This module decides nothing. kopf ends if it has no permission to list trainings. This module then waits for the permission
and starts kopf again (`kopf_run`). It stops a kopf that hangs, and starts it again too. Each watched namespace has a kopf of its own,
so that a missing permission in one namespace does not interrupt the others.

waits on                     unblocked by                        deadline
the right to watch           a person, or the API server         none: `/readyz` and the log name the reason
the start of others          their first list                    START_SECONDS
the end of kopf              an error of kopf                    LIST_SECONDS or SILENT_SECONDS without an answer
the next start               time                                RESTART_SECONDS
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from qwen35_operator.kopf_run import KopfRun
from qwen35_operator.kube.answers import list_item, list_page, plurals
from qwen35_operator.kube.api_errors import ApiError, Forbidden, NotFound
from qwen35_operator.kube.client import METADATA, Query, RestClient
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.kubeconfig import uses_pod
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.list_pages import pages
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.kube.trainings import Trainings, TrainingWatch
from qwen35_operator.kube.watch import METADATA_LIST, not_allowed, where
from qwen35_trainer.manifest import Problem

logger = logging.getLogger(__name__)

RESTART_SECONDS = 5.0
"""Time after which an ended kopf is started again, and between two checks whether trainings can be watched."""
MAX_STARTING = 4
"""Number of kopfs that start and list at the same time. They share one processor with the loop that renews the Lease."""
START_SECONDS = 10.0
"""Time after which the next kopf may start although an earlier one still lists, or hangs."""
FORGET_SECONDS = 600.0
"""Interval at which trainings are forgotten whose deletion nobody has reported. The list has only their metadata."""


async def follow(
    kubeconfig: str | None,
    client: RestClient,
    trainings: Trainings,
    changed: Callable[[TrainingKey], None],
    pace: ListPace,
) -> None:
    """Keep `trainings` equal to the trainings in the watched namespaces, until cancelled.

    changed: called with each training that was created or changed. pace: the pace of kopf's lists.
    """
    starting = asyncio.Semaphore(MAX_STARTING)
    async with asyncio.TaskGroup() as tasks:
        for watch in trainings.watches:
            tasks.create_task(_follow_in(watch, starting, kubeconfig, client, trainings, changed, pace))


async def _follow_in(
    watch: TrainingWatch,
    starting: asyncio.Semaphore,
    kubeconfig: str | None,
    client: RestClient,
    trainings: Trainings,
    changed: Callable[[TrainingKey], None],
    pace: ListPace,
) -> None:
    """Do so for the namespace of `watch`. starting: limits how many kopfs start and list at the same time."""
    while True:
        try:
            await wait_until_watchable(client, watch)
            run = KopfRun(
                watch, lambda event: apply_event(event, trainings, changed), pace, pod_first=uses_pod(kubeconfig)
            )
            outcome = await _outcome(run, starting)
        except Exception as error:  # noqa: BLE001  # logged; one namespace must not end the others
            watch.errors.failed(f"watching {watch.errors.watched}: {error!r}; starting again", traceback=True)
        else:
            watch.errors.failed(f"watching {watch.errors.watched}: {outcome}; starting again")
        await asyncio.sleep(RESTART_SECONDS)


async def _outcome(run: KopfRun, starting: asyncio.Semaphore) -> str:
    """Run kopf until it ends or hangs. Returns which of them, in words."""
    try:
        async with starting:
            run.start()
            await run.listed(START_SECONDS)
        return await run.outcome()
    finally:
        await run.stop()


def apply_event(event: Any, trainings: Trainings, changed: Callable[[TrainingKey], None]) -> None:  # noqa: ANN401
    """Apply one of kopf's raw events to `trainings`.

    Calls `changed` if the event contains a newer version of a training. If a training was deleted, it is removed
    from `trainings`, and `changed` is not called.
    """
    raw = event["object"]
    key: TrainingKey = raw["metadata"]["namespace"], raw["metadata"]["name"]
    if event["type"] == "DELETED":
        trainings.remove(key, raw["metadata"]["uid"])
    elif trainings.put(raw):
        changed(key)


async def forget_deleted(client: RestClient, namespaces: Sequence[str], trainings: Trainings) -> None:
    """Remove trainings whose deletion kopf has missed, every FORGET_SECONDS, until cancelled.

    kopf does not report a deletion that happened while its watch was interrupted. Without this function, the deleted
    training would stay in the operator's memory and would be counted in the metrics.
    """
    while True:
        await asyncio.sleep(FORGET_SECONDS)
        for namespace in namespaces or (None,):
            try:
                listed, version = await _listed(client, namespace)
            except ApiError as error:  # the next time is soon enough
                logger.warning("listing %s: %s", TRAINING.resource, error)
            except Exception:  # one namespace must not end the others
                logger.exception("listing %s in %s: this is a bug", TRAINING.resource, where(namespace))
            else:
                trainings.forget_unlisted(namespace, listed, version)


async def _listed(client: RestClient, namespace: str | None) -> tuple[set[tuple[TrainingKey, str]], int]:
    """Return key and uid of each training of a namespace, and the resourceVersion of this list."""
    listed: set[tuple[TrainingKey, str]] = set()
    path = TRAINING.path(namespace)

    def identity(item: object) -> tuple[TrainingKey, str]:
        metadata = list_item(path, item)["metadata"]
        return (metadata["namespace"], metadata["name"]), metadata["uid"]

    async for page in pages(client, path, {}, identity, accept=METADATA_LIST):
        listed.update(page.items)
    return listed, int(page.version)


async def wait_until_watchable(client: RestClient, watch: TrainingWatch) -> None:
    """Wait until trainings can be listed and watched. Until then, `watch.problem` contains the reason for the wait.

    If kopf started earlier, it would end with an error that does not name the missing permission.
    """
    while True:
        try:
            watch.problem = problem = await _obstacle(client, watch.namespace)
        except ApiError as error:  # a temporary error, which does not change `problem`
            watch.errors.failed(f"watching {watch.errors.watched}: {error}")
        else:
            if problem is None:
                return
            watch.errors.failed(f"{problem.path}: {problem.message} {problem.fix}")
        await asyncio.sleep(RESTART_SECONDS)


async def _obstacle(client: RestClient, namespace: str | None) -> Problem | None:
    """Return the problem that prevents watching trainings, or None if they can be watched.

    namespace: None for all. Only a person can solve the returned problem. Raises ApiError for a temporary error.
    """
    group = f"/apis/{TRAINING.group}/{TRAINING.version}"
    try:
        kinds = plurals(group, await client.get(group))
    except NotFound:
        kinds = set()
    if TRAINING.plural not in kinds:
        return Problem(
            TRAINING.resource, "the cluster has no such kind.", "Apply its definition, which `qwen35 crd` prints."
        )
    path = TRAINING.path(namespace)
    try:
        page = list_page(path, await client.get(path, {"limit": 1}, accept=METADATA_LIST))
        query: Query = {
            "watch": "true",
            "resourceVersion": page.version,
            "timeoutSeconds": 1,
        }
        async with client.lines(path, query, accept=METADATA):
            pass
    except Forbidden as error:
        return not_allowed(TRAINING, namespace, error)
    return None
