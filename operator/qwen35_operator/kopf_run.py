"""One run of the library kopf, in a thread with an event loop of its own, and how long it may be silent.

    thread: kopf ─► list ─► watch ─► events ──► the operator's event loop: `apply`
                      └───────┴─ answers ─────► the operator's event loop: `TrainingWatch.answered`

In the operator's event loop, kopf would install signal handlers, and cancel the tasks of other modules. kopf's discovery of
definitions and namespaces is switched off, because it would need cluster-wide permissions. kopf then looks only once whether
the kind of trainings exists. If it does not find the kind, it waits without an end, and so does a kopf whose watch has ended
without an error. The operator must therefore stop a kopf that hangs, and start another one.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import kopf
from yarl import URL

from qwen35_operator.api import v1alpha1
from qwen35_operator.kopf_session import ShallowSession
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.trainings import TrainingWatch
from qwen35_operator.kube.watch import LASTING_SECONDS

KOPF_PAGE_SIZE = 20
"""Trainings of a page in kopf's lists, whose text kopf reads whole: one training has up to 1.5 MB."""
LOGIN_SECONDS = 5.0
"""Time after which kopf reads credentials again that it could not read."""
LIST_SECONDS = 60.0
"""Time after its start within which kopf must have listed trainings."""
WATCH_SECONDS = 290
"""Time after which the API server ends a watch of kopf, which then opens another one."""
SILENT_SECONDS = 420.0
"""Time without an answer to its lists and watches after which kopf hangs: WATCH_SECONDS, and time to repeat a request."""
CHECK_SECONDS = 5.0
"""Maximum time between two checks whether kopf hangs, or works."""
STOP_SECONDS = 5.0
"""Maximum time that kopf may take to end when it is stopped."""


class KopfRun:
    """One run of kopf, which reports the trainings of one namespace, or of all, until it ends or is stopped.

    Its methods must be called in one event loop, in which `apply` is called too.
    """

    def __init__(
        self, watch: TrainingWatch, apply: Callable[[Any], object], pace: ListPace, *, pod_first: bool
    ) -> None:
        """Prepare a run.

        watch: has the namespace, and records each answer to a list or a watch of trainings. apply: called with each
        event of a training. pace: the pace of its lists. pod_first: whether the pod's credentials are tried before those of a
        kubeconfig.
        """
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._apply = apply
        self._handlers = registry(
            lambda event: self._call(self._pass_on, event), self._answered, pace, pod_first=pod_first
        )
        self._stop = threading.Event()
        self._started_at = 0.0
        self._answered_at: float | None = None
        self._opened_at: float | None = None  # when it began to watch
        self._listed = asyncio.Event()  # set too when it has ended
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        """Done when kopf has ended. The result is the exception that ended it, if any."""

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system has no more threads."""
        threading.Thread(target=self._run, name="kopf", daemon=True).start()
        self._started_at = time.monotonic()

    async def listed(self, seconds: float) -> None:
        """Wait until kopf has listed all trainings and watches, or has ended. seconds: the maximum time to wait."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._listed.wait(), seconds)

    async def stop(self) -> None:
        """Stop kopf if it has started, and wait until it has ended, at most STOP_SECONDS."""
        if not self._started_at:
            return
        self._stop.set()
        await asyncio.wait({self.ended}, timeout=STOP_SECONDS)
        self.ended.cancel()

    async def outcome(self) -> str:
        """Wait until kopf has ended or hangs. Returns which of them, in words."""
        while not self.ended.done():
            rest = seconds_until_hung(self._started_at, self._answered_at, time.monotonic())
            if rest <= 0:
                if self._answered_at is None:
                    return f"kopf has not listed any for {LIST_SECONDS:g} s"
                return f"kopf has had no answer to its list or watch for {SILENT_SECONDS:g} s"
            await asyncio.wait({self.ended}, timeout=min(rest, CHECK_SECONDS))
            lasts = self._opened_at is not None and time.monotonic() - self._opened_at >= LASTING_SECONDS
            if lasts and not self.ended.done():
                self._watch.errors.works()
        error = self.ended.result()
        return "kopf has ended" if error is None else f"kopf has ended: {error!r}"

    def _answered(self, url: URL) -> None:
        """Record an answer of the API server. Called by kopf's thread."""
        # A server's URL may have a path of its own, before that of Kubernetes.
        if url.path.endswith(TRAINING.path(self._watch.namespace)):
            self._call(self._record_answer, "watch" in url.query)

    def _pass_on(self, event: Any) -> None:  # noqa: ANN401  # JSON
        """Apply an event, unless this run is stopped: a later run may have listed since, and this event may be old."""
        if not self._stop.is_set():
            self._apply(event)

    def _record_answer(self, is_watch: bool) -> None:
        if self._stop.is_set():  # a later run may have begun
            return
        self._answered_at = time.monotonic()
        self._watch.answered()
        if is_watch and self._opened_at is None:
            self._opened_at = self._answered_at
            self._watch.listed = True
            self._listed.set()

    def _run(self) -> None:
        """Run kopf in this thread until it is stopped or fails."""
        outcome: BaseException | None = None
        try:
            asyncio.run(_operate(self._handlers, self._watch.namespace, self._stop))
        except BaseException as error:  # noqa: BLE001  # reported in the other thread, which would wait without an end
            outcome = error
        self._call(self._record_end, outcome)

    def _record_end(self, outcome: BaseException | None) -> None:
        self._listed.set()
        if not self.ended.done():
            self.ended.set_result(outcome)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the operator's event loop, from kopf's thread."""
        with suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(function, *arguments)


def seconds_until_hung(started_at: float, answered_at: float | None, now: float) -> float:
    """Return the seconds after which kopf hangs if the API server does not answer it until then; 0 or less if it hangs.

    started_at: when kopf was started. answered_at: when the API server last answered a list or a watch of trainings; None
    if it never did.
    """
    deadline = started_at + LIST_SECONDS if answered_at is None else answered_at + SILENT_SECONDS
    return deadline - now


def registry(
    apply: Callable[[Any], object], answered: Callable[[URL], object], pace: ListPace, *, pod_first: bool
) -> kopf.OperatorRegistry:
    """Return the handlers for one run of kopf.

    apply: called with each event of a training. answered: called with the URL of each request of kopf that the API
    server has answered without an error. pace: the pace of its lists. pod_first: whether the pod's credentials
    are tried before those of a kubeconfig.
    """
    handlers = kopf.OperatorRegistry()
    # Neither way needs the synchronous client library.
    ways = (kopf.login_with_kubeconfig, kopf.login_with_service_account)
    kopf.on.login(registry=handlers)(_login(answered, pace, *(reversed(ways) if pod_first else ways)))

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
    # kopf would kill the whole process if it had not ended this long after an error. `KopfRun.stop` gives up waiting instead.
    kopf_settings.process.ultimate_exiting_timeout = None
    kopf_settings.scanning.disabled = True
    kopf_settings.networking.request_timeout = 30
    kopf_settings.networking.connect_timeout = 5
    kopf_settings.networking.error_backoffs = (0.1, 0.5, 1, 2, 5)
    kopf_settings.watching.server_timeout = WATCH_SECONDS
    # Parsed objects are large. By default kopf lists all of them in one page; it keeps each for the idle timeout.
    kopf_settings.watching.chunk_size = KOPF_PAGE_SIZE
    kopf_settings.queueing.idle_timeout = 0.1
    # kopf would wait a minute when the credentials cannot be read, for example while their file is replaced.
    kopf_settings.execution.default_backoff = LOGIN_SECONDS
    return kopf_settings


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


def _login(
    answered: Callable[[URL], object],
    pace: ListPace,
    *ways: Callable[..., kopf.ConnectionInfo | None],
) -> Callable[..., Coroutine[Any, Any, ShallowSession | None]]:
    """Return a login handler for kopf, which tries `ways` in order and opens a session with the first credentials.

    The handler returns None if no way gives credentials.
    """

    async def login(**arguments: Any) -> ShallowSession | None:  # noqa: ANN401  # kopf's calling convention
        for way in ways:
            if (credentials := await asyncio.to_thread(way, **arguments)) is not None:
                return ShallowSession.open(credentials, answered, pace)
        return None

    return login
