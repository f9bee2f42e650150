"""Lists and watches the objects of one kind that have the operator's label, in one namespace or in all (list-watch).

    list in pages ─► store.replace ─► watch from there ─► store.put / remove …
      ▲                                    │ 410 Gone: the version is too old
      └────────────────────────────────────┘ connection cut, silent or refused: back off, continue the watch, or list again

waits on               unblocked by                     deadline
an event or bookmark   the API server                   READ_IDLE_SECONDS, then a new watch
the next try           time                             MAX_BACKOFF_SECONDS
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qwen35_operator.desired import object_names
from qwen35_operator.kube.answers import list_item
from qwen35_operator.kube.api_errors import ApiError, Forbidden, Gone, NotFound, Unexpected
from qwen35_operator.kube.client import METADATA, PLAIN, JsonObject, RestClient
from qwen35_operator.kube.error_log import ErrorLog
from qwen35_operator.kube.kinds import METADATA_ONLY, OPTIONAL, ObjectKind
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.list_pages import pages
from qwen35_operator.kube.object_parsing import record, training_of
from qwen35_operator.kube.object_records import ObjectRecord
from qwen35_operator.kube.store import Store, TrainingKey
from qwen35_operator.kube.watch_stream import watch_events
from qwen35_trainer.contract.retry import backoff_seconds
from qwen35_trainer.manifest import Problem

logger = logging.getLogger(__name__)

TOO_LARGE_VERSION = "Too large resource version"
"""Part of the API server's answer to a resourceVersion from the future, as after etcd was restored from a backup."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 10.0
MAX_SILENT_SECONDS = 600.0
"""Time without an answer after which a watch counts as blind. Watches are opened again every few minutes, also without events."""
LASTING_SECONDS = 10.0
"""Time after which a stream without an event shows that the watch works."""
MAX_REFUSALS = 5
"""Number of refused requests in a row after which a person has to act. A few are normal: an API server that has just started
knows neither its roles nor the kinds of other API groups for a while."""
OPTIONAL_SECONDS = 60.0
"""Time between two tries to watch an optional kind without the permission, which may never be granted."""
MAX_FAILURES = 5
"""Number of failures in a row after which nobody waits for the first list: 15 s of errors, or 80 s without an answer."""
WARNING_SECONDS = 60.0
"""Minimum time between two warnings of one watch about objects that are not the operator's: anybody can make many."""
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class WatchName(NamedTuple):
    """The objects that a watch observes: those of a resource, in one namespace, or in all if `namespace` is None."""

    resource: str
    namespace: str | None


@dataclass
class Watch:
    """Keeps a `Store` up to date with the objects of one kind, in one namespace, or in all if `namespace` is None."""

    kind: ObjectKind
    namespace: str | None
    store: Store
    changed: Callable[[TrainingKey], None]
    """Called with each training whose objects have changed."""
    restarted: Callable[[str], None] = lambda kind: None
    """Called with the kind's name whenever the watch starts again after an error."""
    recovered: Callable[[], None] = lambda: None
    """Called when the watch works again after a `problem` or a `limitation`. The function must enqueue all trainings of the namespace, because
    no event reports those that waited."""
    lost: Callable[[], None] = lambda: None
    """Called when a watch that worked gets a `problem`, and when a `limitation` begins. The function must enqueue all trainings of the namespace,
    whose status reports it."""
    pace: ListPace = field(default_factory=ListPace)
    """The pace of its lists, which all watches of the process share."""
    problem: Problem | None = None
    """Why the kind cannot be watched; None while it can."""
    limitation: Problem | None = None
    """Why an optional kind is not watched; None while it is. The store may then lack objects, or have some that are gone."""
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the store contains a complete list. Cleared while there is a `problem`."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known whether the kind can be watched, or MAX_FAILURES have shown that this takes long. Never cleared."""
    seen_at: float = field(default_factory=time.monotonic)
    """When the API server last answered a list or opened the watch, by time.monotonic; at first the start of the process."""
    _version: str = ""  # resourceVersion to continue from; empty if a list is needed first
    _failures: int = 0  # in a row; a stream that ended soon and without an event is one too
    _refusals: int = 0  # in a row
    _errors: ErrorLog = field(init=False)
    _late: Problem = field(init=False)  # the problem while the first list fails
    _warned: float = -math.inf  # when an object was last reported, by time.monotonic
    _ignored: int = 0  # objects that were not reported since

    def __post_init__(self) -> None:
        self._errors = ErrorLog(f"{self.kind.resource} in {where(self.namespace)}")
        self._late = not_listed((self.kind,), self.namespace)

    async def run(self, client: RestClient) -> None:
        """Keep the store up to date, until cancelled."""
        while True:
            wanted = 0.0
            self._failures += 1  # until the watch has worked
            try:
                self._version = self._version or await self._list(client)
                await self._follow(client)
            except Gone:
                self._version = ""
                self.restarted(self.kind.name)
            except ApiError as error:
                self._errors.failed(f"watching {self._errors.watched}: {error}")
                wanted = error.retry_after
                refused = isinstance(error, Forbidden | NotFound)
                self._refusals = self._refusals + 1 if refused else 0
                if refused or isinstance(error, Unexpected) or TOO_LARGE_VERSION in error.message:
                    self._version = ""
                if refused:
                    wanted = max(wanted, self._mark_unavailable(error))
                self.restarted(self.kind.name)
            except Exception as error:  # noqa: BLE001  # logged; one watch must not end the others
                self._errors.failed(f"watching {self._errors.watched}: this is a bug: {error!r}", traceback=True)
                self._version = ""
                self.restarted(self.kind.name)
            self._give_up_first_list()
            # Wait after a stream without errors too: a server that always ends it immediately must not get many requests.
            wait = backoff_seconds(self._failures + 1, first=FIRST_BACKOFF_SECONDS, maximum=MAX_BACKOFF_SECONDS)
            spread = random.uniform(0.25, 0.5)  # noqa: S311, not a secret: spreads the requests
            await asyncio.sleep(max(wait * spread, wanted))

    async def _list(self, client: RestClient) -> str:
        """List all objects, and replace the store's records by them. Returns the resourceVersion to watch from."""
        async with self.pace.turn():
            records, version = await self._list_pages(client)
        for key in self.store.replace(self.namespace, records, version):
            self.changed(key)
        if self.problem in (None, self._late):  # otherwise only the watch shows whether the problem is solved
            self._mark_synced()
        return version

    async def _list_pages(self, client: RestClient) -> tuple[list[tuple[str, ObjectRecord]], str]:
        """Return all objects as records, with the names of their trainings, and the resourceVersion of the list."""
        records: list[tuple[str, ObjectRecord]] = []
        path, accept = self.kind.path(self.namespace), METADATA_LIST if self.kind in METADATA_ONLY else PLAIN

        def parsed(item: object) -> tuple[str, ObjectRecord | None]:
            raw = list_item(path, item)
            return training_of(raw), self._record(raw)

        began = time.monotonic()
        async for page in pages(client, path, {"labelSelector": self.kind.selector}, parsed, accept=accept):
            self.seen_at = time.monotonic()
            records += [each for each in page.items if each[1] is not None]
            if page.token:
                await self.pace.pause(self.seen_at - began)
            began = time.monotonic()
        return records, page.version

    async def _follow(self, client: RestClient) -> None:
        """Watch from the last known resourceVersion on, and apply the events to the store until the stream ends.

        Raises Gone if the resourceVersion is too old, and ApiError for any other failure.
        """
        path, selector = self.kind.path(self.namespace), {"labelSelector": self.kind.selector}
        accept = METADATA if self.kind in METADATA_ONLY else PLAIN
        async with watch_events(client, path, selector, self._version, accept=accept) as events:
            self._mark_synced()
            self._end_limitation()
            self.seen_at = time.monotonic()
            self._refusals = 0
            opened = time.monotonic()
            try:
                async for event in events:
                    # Updated with each event, so that no event is repeated after a cut.
                    self._version = self._apply(event)
                    self._mark_working()
            finally:
                if time.monotonic() - opened >= LASTING_SECONDS:
                    self._mark_working()

    def _apply(self, event: JsonObject) -> str:
        """Apply one event to the store. Returns the resourceVersion of the event."""
        raw = event["object"]
        metadata = raw["metadata"]
        version = str(metadata["resourceVersion"])
        if event["type"] == "BOOKMARK":
            return version
        if event["type"] == "DELETED":
            changed = self.store.remove(metadata["namespace"], metadata["name"], metadata["uid"], version)
        else:
            changed_record = self._record(raw)
            changed = set() if changed_record is None else self.store.put(training_of(raw), changed_record)
        for key in changed:
            self.changed(key)
        return version

    def _record(self, raw: JsonObject) -> ObjectRecord | None:
        """Return the record of an object; None if it cannot be parsed, so that no object blinds the watch to all others."""
        try:
            return record(self.kind, raw)
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            self._warn(raw.get("metadata", {}), error)
            return None

    def _warn(self, metadata: JsonObject, error: Exception) -> None:
        """Log that an object is ignored, at most once per WARNING_SECONDS."""
        if time.monotonic() - self._warned < WARNING_SECONDS:
            self._ignored += 1
            return
        logger.warning(
            "%s %s/%s is ignored: it has the label %s but lacks a field of the operator's objects: %r; ignored since the last "
            "such warning: %d others",
            *(self.kind.name, metadata.get("namespace"), metadata.get("name"), object_names.TRAINING, error),
            self._ignored,
        )
        self._warned, self._ignored = time.monotonic(), 0

    def _mark_working(self) -> None:
        """Record an event, or a stream that lasted. An open stream alone proves nothing: the next line may be an error."""
        self._failures = 0
        self._errors.works()

    def _mark_synced(self) -> None:
        solved, self.problem = self.problem is not None, None
        self.synced.set()
        self.settled.set()
        if solved:
            self.recovered()

    def _end_limitation(self) -> None:
        ended, self.limitation = self.limitation is not None, None
        if ended:
            self.recovered()

    def _give_up_first_list(self) -> None:
        """Record a problem if the first list has failed MAX_FAILURES times.

        The problem blocks the trainings of the namespace. Without it, the leader would wait, and would serve no namespace.
        """
        if not self.synced.is_set() and self.problem is None and self._failures >= MAX_FAILURES:
            self.problem = self._late
            self.settled.set()

    def _mark_unavailable(self, error: ApiError) -> float:
        """Record the problem if only a person can solve it: KubeRay or a permission is missing.

        Other errors are temporary and are not recorded here, and neither are the first MAX_REFUSALS - 1 refusals in a row. A
        missing permission for an optional kind is a limitation, with which the operator serves all trainings. Returns the
        minimum time until the next try, in seconds.
        """
        if self._refusals < MAX_REFUSALS and self.problem is None:
            return 0.0
        if isinstance(error, Forbidden) and self.kind in OPTIONAL:
            self.seen_at = time.monotonic()
            self._mark_synced()
            begins, self.limitation = self.limitation is None, not_allowed(self.kind, self.namespace, error)
            if begins:
                self.lost()
            return OPTIONAL_SECONDS
        if isinstance(error, NotFound) and self.kind.group == "ray.io":
            fix = "Install KubeRay 1.5.1 or newer; the operator does not need a restart."
            self.problem = Problem(self.kind.resource, "the cluster has no such kind: KubeRay is not installed.", fix)
        elif isinstance(error, Forbidden):
            self.problem = not_allowed(self.kind, self.namespace, error)
        else:
            return 0.0
        worked = self.synced.is_set()
        self.synced.clear()
        self.settled.set()
        if worked:
            self.lost()
        return 0.0


def blind(kind: ObjectKind, namespace: str | None, seen_at: float) -> Problem | None:
    """Return the problem to report if the API server has not answered a watch for MAX_SILENT_SECONDS; otherwise None.

    namespace: None for all namespaces. seen_at: when it last answered, by time.monotonic.
    """
    if (seconds := time.monotonic() - seen_at) < MAX_SILENT_SECONDS:
        return None
    message = f"the API server has not answered its watch of {where(namespace)} for {seconds:.0f} s."
    return Problem(kind.resource, message, "The log shows errors.")


def not_listed(kinds: Sequence[ObjectKind], namespace: str | None) -> Problem:
    """Return the problem to report while the objects of some kinds have not been listed yet. namespace: None for all."""
    resources = ", ".join(dict.fromkeys(kind.resource for kind in kinds))
    return Problem(resources, f"not listed yet in {where(namespace)}.", "Wait; the log shows errors.")


def not_allowed(kind: ObjectKind, namespace: str | None, error: Forbidden) -> Problem:
    """Return the problem to report when the operator has no permission to watch a kind of object.

    The problem says which permission to grant. namespace: None for all namespaces.
    """
    fix = f"Grant get, list and watch on {kind.resource} in {where(namespace)} to the operator."
    return Problem(kind.resource, f"the operator may not watch it: {error.message}.", fix)


def where(namespace: str | None) -> str:
    """Return words for a namespace, or for all namespaces if it is None."""
    return "all namespaces" if namespace is None else f"namespace {namespace}"
