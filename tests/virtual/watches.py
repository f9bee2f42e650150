"""Watches of the API server in memory: changes from a resourceVersion on, bookmarks, and the end after some time."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from tests.virtual.api_server import ApiServer, Request, partial
from tests.virtual.failures import Failure
from tests.virtual.resources import place
from tests.virtual.selectors import Matches, selected
from tests.virtual.stored_objects import Change, Stored

BOOKMARK_SECONDS = 60.0
DELIVERY_SECONDS = 0.005
"""Time from a change to its event: what a client has cached is a little behind."""


class Watch:
    """One watch request."""

    def __init__(self, server: ApiServer, request: Request) -> None:
        """Open the watch. Raises Failure."""
        where = place(request.path)
        if where is None:
            raise Failure(404, "the server could not find the requested resource")
        self._resource = server.resource(where)
        if request.rights is not None:
            request.rights.check("watch", self._resource, where, request.query)
        self._server = server
        self._namespace = where.namespace
        self._matches: Matches = selected(request.query)
        self._only_metadata = "PartialObjectMetadata" in request.accept
        self._seconds = float(request.query.get("timeoutSeconds", "1800"))
        self._version = int(request.query.get("resourceVersion") or server.objects.version)
        self._bookmarks = request.query.get("allowWatchBookmarks") == "true"
        self._news = asyncio.Event()

    async def lines(self) -> AsyncIterator[bytes]:
        """The events as lines of JSON, until the time of the watch is over or its kind is not served any more."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        if self._version < self._server.objects.compacted:
            failure = Failure(410, f"too old resource version: {self._version} ({self._server.objects.compacted})")
            yield _line("ERROR", failure.body)
            return
        ignore = self._server.objects.listen(self._heard)
        try:
            self._news.set()
            while loop.time() < end and self._resource.qualified not in self._server.undefined:
                for line in self._pending():
                    yield line
                self._news.clear()
                remaining = end - loop.time()
                try:
                    async with asyncio.timeout(min(BOOKMARK_SECONDS, max(remaining, 0.0))):
                        await self._news.wait()
                    await asyncio.sleep(DELIVERY_SECONDS)
                except TimeoutError:
                    if self._bookmarks and remaining > BOOKMARK_SECONDS:
                        yield self._bookmark()
        finally:
            ignore()

    def _bookmark(self) -> bytes:
        self._version = self._server.objects.version
        metadata = {"resourceVersion": str(self._version)}
        header = {"kind": self._resource.kind, "apiVersion": self._resource.api_version}
        return _line("BOOKMARK", header | {"metadata": metadata})

    def _heard(self, change: Change) -> None:
        if change.after.resource is self._resource and self._namespace in (
            None,
            change.after.metadata.get("namespace"),
        ):
            self._news.set()

    def _pending(self) -> list[bytes]:
        """The events of all changes that this watch has not reported."""
        changes = self._server.objects.changes
        lines = []
        for change in _since(changes, self._version):
            self._version = change.version
            event = self._event(change)
            if event is not None:
                lines.append(event)
        return lines

    def _event(self, change: Change) -> bytes | None:
        """The event of a change as this watch's selector sees it; None if it does not concern the selected objects."""
        after = change.after
        if after.resource is not self._resource or self._namespace not in (None, after.metadata.get("namespace")):
            return None
        was = change.before is not None and self._matches(change.before.body)
        now = change.kind != "DELETED" and self._matches(after.body)
        if now:
            return self._of("MODIFIED" if was else "ADDED", after)
        if not was:
            return None
        # An object that is not selected any more is reported as it was, with the version of the change.
        assert change.before is not None
        last = change.before.copy() if change.kind != "DELETED" else after.copy()
        last["metadata"]["resourceVersion"] = str(change.version)
        return self._of("DELETED", Stored(self._resource, last))

    def _of(self, kind: str, stored: Stored) -> bytes:
        if self._only_metadata:
            return _line(kind, partial(stored))
        return b'{"type":"%s","object":%s}\n' % (kind.encode(), stored.text)


def _since(changes: list[Change], version: int) -> list[Change]:
    """The changes after this version; the list is ordered by version."""
    first = len(changes)
    while first and changes[first - 1].version > version:
        first -= 1
    return changes[first:]


def _line(kind: str, body: Any) -> bytes:
    return json.dumps({"type": kind, "object": body}, separators=(",", ":")).encode() + b"\n"
