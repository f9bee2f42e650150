"""List, then watch, for ever: one kind, everywhere or in one namespace, by our label.

    list in pages ─► store.replace ─► watch from there ─► store.put / remove …
      ▲                                    │ 410 Gone: the place is lost
      └────────────────────────────────────┘ cut, silent, refused: wait, watch on; list again where that is not possible

waits on               unblocked by                     deadline
an event or bookmark   the API server                   READ_IDLE seconds, then again
the next try           time                             LONGEST_WAIT seconds
"""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from qwen35_operator.desired import names
from qwen35_operator.kube.client import METADATA, PLAIN, Json, Query, RestClient
from qwen35_operator.kube.errors import ApiError, Forbidden, Gone, NotFound
from qwen35_operator.kube.kinds import METADATA_ONLY, Kind
from qwen35_operator.kube.parse import Record, record, training_of
from qwen35_operator.kube.store import Key, Store
from qwen35_trainer.spec import Problem

logger = logging.getLogger(__name__)

PAGE = 200
SERVER_SECONDS = 290
"""The API server ends a watch after so long: connections move on to replicas that came later."""
FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclass
class Watch:
    """One stream. `problem` says why it cannot see, while it cannot."""

    kind: Kind
    namespace: str | None
    store: Store
    changed: Callable[[Key], None]
    """Told of every training for which there is news."""
    restarted: Callable[[str], None] = lambda kind: None
    recovered: Callable[[], None] = lambda: None
    """Told when it can see again what it could not: trainings that waited for that have no event to wake them."""
    problem: Problem | None = None
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once there has been a complete list."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known whether it can see."""
    _version: str = ""
    """From where to watch on; empty when there has to be a list first."""
    _wait: float = FIRST_WAIT

    async def run(self, client: RestClient) -> None:
        """Until cancelled."""
        while True:
            try:
                self._version = self._version or await self._list(client)
                await self._follow(client)
            except Gone:
                self._version = ""
            except ApiError as error:
                self._cannot(error)
                logger.warning("watching %s: %s", self.kind.resource, error)
                if isinstance(error, (Forbidden, NotFound)):
                    self._version = ""
                self._wait = min(self._wait * 2, LONGEST_WAIT)
            self.restarted(self.kind.name)
            # Also after a stream that just ended: one that always ends at once must not be asked for without a pause.
            await asyncio.sleep(self._wait * random.uniform(0.25, 0.5))  # noqa: S311, no secret: replicas spread

    async def _list(self, client: RestClient) -> str:
        """Everything there is, in pages. Returns the version to watch from."""
        pages: list[tuple[str, Record]] = []
        token = ""
        accept = METADATA_LIST if self.kind in METADATA_ONLY else PLAIN
        while True:
            query: Query = {
                "labelSelector": self.kind.selector,
                "limit": PAGE,
                **({"continue": token} if token else {}),
            }
            page = await client.get(self.kind.path(self.namespace), query, accept=accept)
            found = ((training_of(raw), self._record(raw)) for raw in page["items"] or ())
            pages += [(training, one) for training, one in found if one is not None]
            token = page["metadata"].get("continue", "")
            if not token:
                break
        version = str(page["metadata"]["resourceVersion"])
        for key in self.store.replace(self.namespace, pages, version):
            self.changed(key)
        if self.problem is None:  # else it is not said yet that it may watch too
            self._can()
        return version

    async def _follow(self, client: RestClient) -> None:
        """Events until the stream ends."""
        query: Query = {
            "watch": "true",
            "labelSelector": self.kind.selector,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": SERVER_SECONDS,
        }
        accept = METADATA if self.kind in METADATA_ONLY else PLAIN
        async with client.lines(self.kind.path(self.namespace), query, accept=accept) as lines:
            self._can()
            self._wait = FIRST_WAIT
            async for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    break  # cut in the middle of an event: it comes again
                # Kept event by event: after a cut, what was seen before must not be seen again.
                self._version = self._take(event)

    def _take(self, event: Json) -> str:
        """One event. Returns its version."""
        raw = event["object"]
        if event["type"] == "ERROR":
            raise (
                Gone(raw.get("code", 410), raw.get("message", ""))
                if raw.get("code") == 410
                else ApiError(raw.get("code", 0), raw.get("message", ""))
            )
        version = str(raw["metadata"]["resourceVersion"])
        if event["type"] == "BOOKMARK":
            return version
        about = raw["metadata"]
        if event["type"] == "DELETED":
            changed = self.store.remove(about["namespace"], about["name"], about["uid"], version)
        else:
            one = self._record(raw)
            changed = set() if one is None else self.store.put(training_of(raw), one)
        for key in changed:
            self.changed(key)
        return version

    def _record(self, raw: Json) -> Record | None:
        """None for an object that bears our label and was not made by us."""
        try:
            return record(self.kind, raw)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            about = raw.get("metadata", {})
            logger.warning(
                "%s %s/%s is passed over: it has the label %s, and not what ours have: %r",
                *(self.kind.name, about.get("namespace"), about.get("name"), names.TRAINING, error),
            )
            return None

    def _can(self) -> None:
        blind, self.problem = self.problem is not None, None
        self.synced.set()
        self.settled.set()
        if blind:
            self.recovered()

    def _cannot(self, error: ApiError) -> None:
        """Remember what only people can mend; all else passes."""
        if isinstance(error, NotFound) and self.kind.group == "ray.io":
            fix = "Install KubeRay 1.5.1 or newer; nothing here needs to be restarted."
            self.problem = Problem(self.kind.resource, "there is no such kind: KubeRay is not installed.", fix)
        elif isinstance(error, Forbidden):
            self.problem = not_allowed(self.kind, self.namespace, error)
        else:
            return
        self.synced.clear()
        self.settled.set()


def not_listed(kind: Kind) -> Problem:
    """At first, of any kind."""
    return Problem(kind.resource, "not listed yet.", "Wait; the log says what is in the way.")


def not_allowed(kind: Kind, namespace: str | None, error: Forbidden) -> Problem:
    """Who must grant what."""
    where = "all namespaces" if namespace is None else f"namespace {namespace}"
    fix = f"Grant get, list and watch on {kind.resource} in {where} to the operator."
    return Problem(kind.resource, f"the operator may not watch it: {error.message}.", fix)
