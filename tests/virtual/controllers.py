"""What all controllers of the cluster in memory have in common, and the garbage collector."""

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar

from tests.virtual.api_server import ApiServer
from tests.virtual.failures import Failure
from tests.virtual.resources import RESOURCES, Resource
from tests.virtual.stored_objects import Change, Stored


def resource(plural: str) -> Resource:
    return next(item for item in RESOURCES if item.plural == plural)


class Controller:
    """Looks at everything, a moment after each change of its kinds, and brings it one step nearer to what it should be."""

    kinds: ClassVar[tuple[str, ...]] = ()
    """Plurals of the kinds whose changes concern it; empty for all."""
    seconds: ClassVar[float] = 0.05
    """Time from a change to the look."""
    again: ClassVar[float | None] = None
    """Time after which it looks again without a change; None: never."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.paused = False
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        ignore = self.server.objects.listen(self._heard)
        try:
            self._news.set()
            while True:
                try:
                    async with asyncio.timeout(self.again):
                        await self._news.wait()
                except TimeoutError:
                    pass  # it looks again
                self._news.clear()
                await asyncio.sleep(self.seconds)
                if not self.paused:
                    self.look()
        finally:
            ignore()

    def look(self) -> None:
        """One look at everything."""
        raise NotImplementedError

    def resume(self) -> None:
        self.paused = False
        self._news.set()

    def of(self, plural: str, namespace: str | None = None) -> list[Stored]:
        return list(self.server.objects.of(resource(plural), namespace))

    def write_status(self, stored: Stored, status: dict[str, Any]) -> None:
        """Write the status, unless it is that already."""
        if status != stored.body.get("status"):
            self.server.replace(stored, stored.copy() | {"status": status}, part="status", manager=type(self).__name__)

    def delete(self, stored: Stored, **options: Any) -> None:
        """Delete an object that may have gone meanwhile."""
        try:
            self.server.delete(self.server.stored(stored.resource, *stored.key[1:]), options)
        except Failure as failure:
            if failure.code != 404:
                raise

    def _heard(self, change: Change) -> None:
        if not self.kinds or change.after.resource.plural in self.kinds:
            self._news.set()


class GarbageCollector(Controller):
    """Deletes objects whose owners are all gone, as background deletion does."""

    seconds = 0.1

    def look(self) -> None:
        everything = self.server.objects.all()
        living = {stored.metadata["uid"] for stored in everything}
        for stored in everything:
            owners: Iterable[dict[str, Any]] = stored.metadata.get("ownerReferences") or ()
            if owners and not living.intersection(owner["uid"] for owner in owners):
                self.delete(stored)
