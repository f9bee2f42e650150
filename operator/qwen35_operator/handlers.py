"""kopf's wiring: events of trainings become bodies and work. Nothing is decided here.

kopf has a thread and a loop of its own: it takes the process's signals where it can, when it ends it cancels every task of
its loop that it does not know, and it ends when it may not list. Here that is waited out, and it begins anew. It looks for no
definitions and namespaces: it would need rights on all of the cluster for that.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import kopf

from qwen35_operator.api import v1alpha1
from qwen35_operator.kube.client import METADATA, Query, RestClient
from qwen35_operator.kube.errors import ApiError, Forbidden, NotFound
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.store import Key
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.kube.watch import METADATA_LIST, PAGE, not_allowed
from qwen35_operator.settings import Settings
from qwen35_trainer.spec import Problem

logger = logging.getLogger(__name__)

AGAIN = 5.0
"""Seconds until kopf begins anew."""
GRACE = 5.0
"""Seconds that it has to end."""


async def follow(
    options: Settings, kubeconfig: str | None, client: RestClient, trainings: Trainings, changed: Callable[[Key], None]
) -> None:
    """Fill `trainings`, until cancelled. `changed` is told of every training for which there is news."""
    loop = asyncio.get_running_loop()

    def take(event: Any) -> None:  # noqa: ANN401  # kopf's raw event
        raw = event["object"]
        key: Key = raw["metadata"]["namespace"], raw["metadata"]["name"]
        if event["type"] == "DELETED":
            trainings.remove(key, raw["metadata"]["uid"])
        elif trainings.put(raw):
            changed(key)

    while True:
        await visible(client, options.namespaces, trainings)
        stop = threading.Event()
        ended: asyncio.Future[None] = loop.create_future()
        handlers = registry(lambda event: loop.call_soon_threadsafe(take, event), explicit=kubeconfig is not None)
        arguments = (handlers, options, stop, loop, ended)
        threading.Thread(target=_live, args=arguments, name="kopf", daemon=True).start()
        try:
            await asyncio.shield(ended)
        except Exception as error:  # noqa: BLE001  # whatever ends kopf, the trainings are still there
            logger.warning("events of %s: %r; again in %g s", v1alpha1.PLURAL, error, AGAIN)
        finally:
            stop.set()
            await asyncio.wait({ended}, timeout=GRACE)
            ended.cancel()
        await asyncio.sleep(AGAIN)


async def visible(client: RestClient, namespaces: Sequence[str], trainings: Trainings) -> None:
    """Return once trainings can be listed and watched. kopf would end without a word that reaches people."""
    told = ""
    while True:
        try:
            trainings.problem = problem = await _obstacle(client, namespaces)
        except ApiError as error:  # that passes: what could be seen before can be seen after it
            said = f"{TRAINING.resource}: {error.message}"
        else:
            if problem is None:
                return
            said = f"{problem.path}: {problem.message} {problem.fix}"
        if said != told:
            logger.warning(said)
        told = said
        await asyncio.sleep(AGAIN)


async def _obstacle(client: RestClient, namespaces: Sequence[str]) -> Problem | None:
    """What only people can mend. Raises ApiError for all else."""
    try:
        known = await client.get(f"/apis/{TRAINING.group}/{TRAINING.version}")
    except NotFound:
        known = {}
    if all(one["name"] != TRAINING.plural for one in known.get("resources", ())):
        return Problem(TRAINING.resource, "there is no such kind.", "Apply its definition, which `qwen35 crd` prints.")
    for namespace in namespaces or (None,):
        path = TRAINING.path(namespace)
        try:
            page = await client.get(path, {"limit": 1}, accept=METADATA_LIST)
            query: Query = {
                "watch": "true",
                "resourceVersion": page["metadata"]["resourceVersion"],
                "timeoutSeconds": 1,
            }
            async with client.lines(path, query, accept=METADATA):
                pass
        except Forbidden as error:
            return not_allowed(TRAINING, namespace, error)
    return None


def registry(take: Callable[[Any], object], *, explicit: bool) -> kopf.OperatorRegistry:
    """Handlers for one life of kopf; `explicit`: a kubeconfig was named, and comes before the pod's own credentials."""
    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers)(_login_as_told if explicit else _login)

    @kopf.on.event(v1alpha1.GROUP, v1alpha1.VERSION, v1alpha1.PLURAL, registry=handlers)
    async def _event(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401  # kopf's calling convention
        take(event)

    return handlers


class NoDiffs(kopf.AnnotationsDiffBaseStorage):
    """For handlers of events. kopf copies each object several times to find out what changed, and nobody here asks."""

    def build(self, **_: Any) -> kopf.BodyEssence:  # noqa: ANN401  # kopf's calling convention
        return kopf.BodyEssence()


def settings() -> kopf.OperatorSettings:
    """Kopf without annotations, finalizers or events of its own, and with deadlines that fit a reconcile."""
    chosen = kopf.OperatorSettings()
    chosen.persistence.diffbase_storage = NoDiffs()
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 5
    chosen.networking.error_backoffs = (0.1, 0.5, 1, 2, 5)
    chosen.watching.server_timeout = 290
    # Parsed objects are large. kopf lists all at once unless told otherwise, and keeps each for as long as this.
    chosen.watching.chunk_size = PAGE
    chosen.queueing.idle_timeout = 0.1
    return chosen


def _live(
    handlers: kopf.OperatorRegistry,
    options: Settings,
    stop: threading.Event,
    loop: asyncio.AbstractEventLoop,
    ended: asyncio.Future[None],
) -> None:
    """One life of kopf, in a thread: until `stop`, or an error, which `ended` gets."""
    problem: BaseException | None = None
    try:
        asyncio.run(_operate(handlers, options, stop))
    except Exception as error:  # noqa: BLE001  # it is raised in the other thread
        problem = error
    with suppress(RuntimeError):  # the other loop has not waited
        loop.call_soon_threadsafe(_settle, ended, problem)


async def _operate(handlers: kopf.OperatorRegistry, options: Settings, stop: threading.Event) -> None:
    try:
        await kopf.operator(
            registry=handlers,
            settings=settings(),
            standalone=True,
            clusterwide=not options.namespaces,
            namespaces=options.namespaces,
            stop_flag=stop,
        )
    finally:
        stop.set()  # kopf has a thread wait for it, and the loop waits for that


def _settle(ended: asyncio.Future[None], problem: BaseException | None) -> None:
    if ended.done():
        return
    if problem is None:
        ended.set_result(None)
    else:
        ended.set_exception(problem)


def _login(**arguments: Any) -> kopf.ConnectionInfo | None:  # noqa: ANN401  # kopf's calling convention
    """The pod's own credentials, or those of KUBECONFIG; both without the synchronous client library."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


def _login_as_told(**arguments: Any) -> kopf.ConnectionInfo | None:  # noqa: ANN401  # kopf's calling convention
    return kopf.login_with_kubeconfig(**arguments) or kopf.login_with_service_account(**arguments)
