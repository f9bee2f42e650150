"""Passes the events of trainings, which the library kopf receives, to the store of trainings and to the work queue.

This module decides nothing. kopf runs in a thread with an event loop of its own. In the operator's event loop, kopf
would install signal handlers, and cancel the tasks of other modules. kopf ends if it has no permission to list
trainings. This module then waits for the permission and starts kopf again. Each watched namespace has a kopf of its own, so that a
missing permission in one namespace does not interrupt the others. kopf's discovery of definitions and
namespaces is switched off, because it would need cluster-wide permissions.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import kopf

from qwen35_operator.api import v1alpha1
from qwen35_operator.kopf_session import ShallowSession
from qwen35_operator.kube.api_errors import ApiError, Forbidden, NotFound
from qwen35_operator.kube.client import METADATA, Query, RestClient
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.kubeconfig import uses_pod
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.kube.trainings import Trainings, TrainingWatch
from qwen35_operator.kube.watch import METADATA_LIST, PAGE_SIZE, not_allowed, where
from qwen35_trainer.manifest import Problem

logger = logging.getLogger(__name__)

RESTART_SECONDS = 5.0
"""Time after which an ended kopf is started again, and between two checks whether trainings can be watched. kopf reads
credentials again after the same time, when it could not read them."""
FORGET_SECONDS = 600.0
"""Interval at which trainings are forgotten whose deletion nobody has reported. The list has only their metadata."""
STOP_SECONDS = 5.0
"""Maximum time that kopf may take to end when the operator stops."""


async def follow(
    kubeconfig: str | None, client: RestClient, trainings: Trainings, changed: Callable[[TrainingKey], None]
) -> None:
    """Keep `trainings` equal to the trainings in the watched namespaces, until cancelled.

    changed: called with each training that was created or changed.
    """
    async with asyncio.TaskGroup() as tasks:
        for watch in trainings.watches:
            tasks.create_task(_follow_in(watch, kubeconfig, client, trainings, changed))


async def _follow_in(
    watch: TrainingWatch,
    kubeconfig: str | None,
    client: RestClient,
    trainings: Trainings,
    changed: Callable[[TrainingKey], None],
) -> None:
    """Do so for the namespace of `watch`."""
    loop = asyncio.get_running_loop()

    def hand_over(event: Any) -> None:  # noqa: ANN401  # kopf's raw event
        loop.call_soon_threadsafe(apply_event, event, trainings, changed)

    while True:
        await wait_until_watchable(client, watch)
        stop = threading.Event()
        ended: asyncio.Future[None] = loop.create_future()
        handlers = registry(hand_over, watch.answered, pod_first=uses_pod(kubeconfig))
        arguments = (handlers, watch.namespace, stop, loop, ended)
        threading.Thread(target=_run_kopf, args=arguments, name="kopf", daemon=True).start()
        try:
            await asyncio.shield(ended)
        except Exception as error:  # noqa: BLE001  # the trainings still exist, whatever ends kopf
            logger.warning(
                "watching %s in %s: %r; starting again in %g s",
                *(v1alpha1.PLURAL, where(watch.namespace), error, RESTART_SECONDS),
            )
        finally:
            stop.set()
            await asyncio.wait({ended}, timeout=STOP_SECONDS)
            ended.cancel()
        await asyncio.sleep(RESTART_SECONDS)


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
            else:
                trainings.forget_unlisted(namespace, listed, version)


async def _listed(client: RestClient, namespace: str | None) -> tuple[set[tuple[TrainingKey, str]], int]:
    """Return key and uid of each training of a namespace, and the resourceVersion of this list."""
    listed: set[tuple[TrainingKey, str]] = set()
    query: dict[str, str | int] = {"limit": PAGE_SIZE}
    while True:
        page = await client.get(TRAINING.path(namespace), query, accept=METADATA_LIST)
        metadata = [item["metadata"] for item in page["items"] or ()]
        listed |= {((each["namespace"], each["name"]), each["uid"]) for each in metadata}
        if not (token := page["metadata"].get("continue", "")):
            return listed, int(page["metadata"]["resourceVersion"])
        query["continue"] = token


async def wait_until_watchable(client: RestClient, watch: TrainingWatch) -> None:
    """Wait until trainings can be listed and watched. Until then, `watch.problem` contains the reason for the wait.

    If kopf started earlier, it would end with an error that does not name the missing permission.
    """
    logged = ""
    while True:
        try:
            watch.problem = problem = await _obstacle(client, watch.namespace)
        except ApiError as error:  # a temporary error, which does not change `problem`
            message = f"{TRAINING.resource} in {where(watch.namespace)}: {error.message}"
        else:
            if problem is None:
                return
            message = f"{problem.path}: {problem.message} {problem.fix}"
        if message != logged:
            logger.warning(message)
        logged = message
        await asyncio.sleep(RESTART_SECONDS)


async def _obstacle(client: RestClient, namespace: str | None) -> Problem | None:
    """Return the problem that prevents watching trainings, or None if they can be watched.

    namespace: None for all. Only a person can solve the returned problem. Raises ApiError for a temporary error.
    """
    try:
        group = await client.get(f"/apis/{TRAINING.group}/{TRAINING.version}")
    except NotFound:
        group = {}
    if all(resource["name"] != TRAINING.plural for resource in group.get("resources", ())):
        return Problem(
            TRAINING.resource, "the cluster has no such kind.", "Apply its definition, which `qwen35 crd` prints."
        )
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


def registry(
    apply: Callable[[Any], object], answered: Callable[[], object], *, pod_first: bool
) -> kopf.OperatorRegistry:
    """Return the handlers for one run of kopf.

    apply: called with each event of a training. answered: called, without arguments, after each answer of the API
    server to kopf that is not an error. pod_first: whether the pod's credentials are tried before those of a
    kubeconfig.
    """
    handlers = kopf.OperatorRegistry()
    # Neither way needs the synchronous client library.
    ways = (kopf.login_with_kubeconfig, kopf.login_with_service_account)
    kopf.on.login(registry=handlers)(_login(answered, *(reversed(ways) if pod_first else ways)))

    @kopf.on.event(v1alpha1.GROUP, v1alpha1.VERSION, v1alpha1.PLURAL, registry=handlers)
    async def _event(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401  # kopf's calling convention
        apply(event)

    return handlers


class NoDiffs(kopf.AnnotationsDiffBaseStorage):
    """Disables kopf's diffs, which event handlers do not use. To compute a diff, kopf copies an object several times."""

    def build(self, **_: Any) -> kopf.BodyEssence:  # noqa: ANN401  # kopf's calling convention
        return kopf.BodyEssence()


def settings() -> kopf.OperatorSettings:
    """Return settings with which kopf writes no annotations or events, scans no cluster, and uses little memory."""
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.persistence.diffbase_storage = NoDiffs()
    kopf_settings.posting.enabled = False
    kopf_settings.scanning.disabled = True
    kopf_settings.networking.request_timeout = 30
    kopf_settings.networking.connect_timeout = 5
    kopf_settings.networking.error_backoffs = (0.1, 0.5, 1, 2, 5)
    kopf_settings.watching.server_timeout = 290
    # Parsed objects are large. By default kopf lists all of them in one page; it keeps each for the idle timeout.
    kopf_settings.watching.chunk_size = PAGE_SIZE
    kopf_settings.queueing.idle_timeout = 0.1
    # kopf would wait a minute when the credentials cannot be read, for example while their file is replaced.
    kopf_settings.execution.default_backoff = RESTART_SECONDS
    return kopf_settings


def _run_kopf(
    handlers: kopf.OperatorRegistry,
    namespace: str | None,
    stop: threading.Event,
    loop: asyncio.AbstractEventLoop,
    ended: asyncio.Future[None],
) -> None:
    """Run kopf in this thread until `stop` is set or kopf fails. namespace: that of the trainings; None for all.

    The outcome becomes the result of `ended`, a future of the event loop `loop`, which runs in another thread.
    """
    problem: BaseException | None = None
    try:
        asyncio.run(_operate(handlers, namespace, stop))
    except Exception as error:  # noqa: BLE001  # raised in the other thread
        problem = error
    with suppress(RuntimeError):  # the other loop has closed
        loop.call_soon_threadsafe(_set_outcome, ended, problem)


async def _operate(handlers: kopf.OperatorRegistry, namespace: str | None, stop: threading.Event) -> None:
    try:
        await kopf.operator(
            registry=handlers,
            settings=settings(),
            standalone=True,
            clusterwide=namespace is None,
            namespaces=() if namespace is None else (namespace,),
            stop_flag=stop,
        )
    finally:
        stop.set()  # a thread of kopf waits for the flag, and the loop waits for that thread


def _set_outcome(ended: asyncio.Future[None], problem: BaseException | None) -> None:
    if ended.done():
        return
    if problem is None:
        ended.set_result(None)
    else:
        ended.set_exception(problem)


def _login(
    answered: Callable[[], object],
    *ways: Callable[..., kopf.ConnectionInfo | None],
) -> Callable[..., Coroutine[Any, Any, ShallowSession | None]]:
    """Return a login handler for kopf, which tries `ways` in order and opens a session with the first credentials.

    The handler returns None if no way gives credentials.
    """

    async def login(**arguments: Any) -> ShallowSession | None:  # noqa: ANN401  # kopf's calling convention
        for way in ways:
            if (credentials := await asyncio.to_thread(way, **arguments)) is not None:
                return ShallowSession.open(credentials, answered)
        return None

    return login
