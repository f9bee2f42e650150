"""The cache of all watched objects (an informer): one store per kind, filled by one watch per kind and namespace."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from qwen35_operator.kube.client import RestClient
from qwen35_operator.kube.kinds import WATCHED, ObjectKind
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.store import Store, TrainingKey
from qwen35_operator.kube.watch import Watch, WatchName, blind, not_listed
from qwen35_trainer.manifest import Problem


class ObjectCache:
    """The cache of the child objects of all trainings. Watches keep the cache up to date."""

    def __init__(
        self,
        namespaces: Sequence[str],
        changed: Callable[[TrainingKey], None],
        restarted: Callable[[str], None],
        availability_changed: Callable[[str | None], None] = lambda namespace: None,
        pace: ListPace | None = None,
    ) -> None:
        """Create an empty cache.

        namespaces: the namespaces to watch; empty for all. changed: called with each training whose objects have
        changed. restarted: called with the name of a kind when its watch starts again after an error.
        availability_changed: called when a kind cannot be watched any more in a namespace, and when it can be watched again;
        with the namespace, or None for all. pace: the pace of the lists; None for no pauses.
        """
        pace = pace or ListPace()
        self.stores: dict[ObjectKind, Store] = {kind: Store() for kind in WATCHED}

        def watches_of(namespace: str | None) -> list[Watch]:
            available = partial(availability_changed, namespace)
            return [
                Watch(kind, namespace, self.stores[kind], changed, restarted, available, available, pace)
                for kind in WATCHED
            ]

        self._watches = {namespace: watches_of(namespace) for namespace in (namespaces or (None,))}

    @property
    def watches(self) -> list[Watch]:
        """The watches of all kinds in all watched namespaces."""
        return [watch for watches in self._watches.values() for watch in watches]

    async def run(self, client: RestClient) -> None:
        """Run all watches, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self.watches:
                tasks.create_task(watch.run(client))

    async def settled(self) -> None:
        """Wait until each watch either has listed its objects completely, or has a problem.

        A problem blocks only the trainings of its namespace (`problems`).
        """
        await asyncio.gather(*(watch.settled.wait() for watch in self.watches))

    def incomplete(self, namespace: str | None) -> list[Problem]:
        """Return what keeps the objects of a watched namespace from being up to date. namespace: None for all.

        There is one problem for all kinds whose first list is not complete, and one for each kind that cannot be watched,
        or about which the API server has not answered for MAX_SILENT_SECONDS.
        """
        watches = self._watches.get(namespace, [])
        waiting = [watch.kind for watch in watches if not watch.synced.is_set() and watch.problem is None]
        silent = (blind(watch.kind, namespace, watch.seen_at) for watch in watches if watch.synced.is_set())
        return [
            *([not_listed(waiting, namespace)] if waiting else []),
            *(watch.problem for watch in watches if watch.problem is not None),
            *(problem for problem in silent if problem is not None),
        ]

    def silent_seconds(self) -> dict[WatchName, float]:
        """Return the seconds since the API server last answered, for the watch of each kind and namespace.

        If a kind has several watches in a namespace, the one with the oldest answer counts.
        """
        now = time.monotonic()
        longest: dict[WatchName, float] = {}
        for watch in self.watches:
            name = WatchName(watch.kind.resource, watch.namespace)
            longest[name] = max(longest.get(name, 0.0), now - watch.seen_at)
        return longest

    def problems(self, namespace: str) -> tuple[Problem, ...]:
        """Return the problems of all watches that cover the namespace."""
        return tuple(watch.problem for watch in self._covering(namespace) if watch.problem is not None)

    def limitations(self, namespace: str) -> tuple[Problem, ...]:
        """Return the problems of the optional kinds that are not watched in the namespace."""
        return tuple(watch.limitation for watch in self._covering(namespace) if watch.limitation is not None)

    def _covering(self, namespace: str) -> list[Watch]:
        return [*self._watches.get(None, []), *self._watches.get(namespace, [])]
