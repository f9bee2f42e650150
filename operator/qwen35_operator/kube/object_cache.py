"""The cache of all watched objects (an informer): one store per kind, filled by one watch per kind and namespace."""

import asyncio
import time
from collections.abc import Callable, Sequence

from qwen35_operator.kube.client import RestClient
from qwen35_operator.kube.kinds import WATCHED, ObjectKind
from qwen35_operator.kube.store import Store, TrainingKey
from qwen35_operator.kube.watch import Watch, blind, not_listed
from qwen35_trainer.manifest import Problem


class ObjectCache:
    """The cache of the child objects of all trainings. Watches keep the cache up to date."""

    def __init__(
        self,
        namespaces: Sequence[str],
        changed: Callable[[TrainingKey], None],
        restarted: Callable[[str], None],
        availability_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create an empty cache.

        namespaces: the namespaces to watch; empty for all. changed: called with each training whose objects have
        changed. restarted: called with the name of a kind when its watch starts again after an error.
        availability_changed: called when a kind cannot be watched any more, and when it can be watched again.
        """
        self.stores: dict[ObjectKind, Store] = {kind: Store() for kind in WATCHED}
        self.watches = [
            Watch(kind, namespace, self.stores[kind], changed, restarted, availability_changed, availability_changed)
            for kind in WATCHED
            for namespace in (namespaces or (None,))
        ]

    async def run(self, client: RestClient) -> None:
        """Run all watches, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self.watches:
                tasks.create_task(watch.run(client))

    async def settled(self) -> None:
        """Wait until each watch either has listed its objects completely, or has a problem that a person must solve."""
        await asyncio.gather(*(watch.settled.wait() for watch in self.watches))

    def incomplete(self) -> list[Problem]:
        """Return one problem for each watch that has not listed its objects completely, or that gets no answers.

        A watch gets no answers if the API server has not answered it for MAX_SILENT_SECONDS.
        """
        unlisted = [watch for watch in self.watches if not watch.synced.is_set()]
        silent = (blind(watch.kind, watch.seen_at) for watch in self.watches if watch.synced.is_set())
        return [
            *(watch.problem or not_listed(watch.kind) for watch in unlisted),
            *(problem for problem in silent if problem is not None),
        ]

    def silent_seconds(self) -> dict[str, float]:
        """Return the seconds since the API server last answered the watch of each kind.

        If a kind has several watches, one for each watched namespace, the watch with the oldest answer counts.
        """
        now = time.monotonic()
        longest: dict[str, float] = {}
        for watch in self.watches:
            longest[watch.kind.resource] = max(longest.get(watch.kind.resource, 0.0), now - watch.seen_at)
        return longest

    def problems(self, namespace: str) -> tuple[Problem, ...]:
        """Return the problems of all watches that cover the namespace."""
        relevant = [watch for watch in self.watches if watch.namespace in (None, namespace)]
        return tuple(watch.problem for watch in relevant if watch.problem is not None)
