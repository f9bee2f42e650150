"""Everything that is watched: a store per kind, filled by a watch per kind and namespace."""

import asyncio
from collections.abc import Callable, Sequence

from qwen35_operator.kube.client import RestClient
from qwen35_operator.kube.kinds import WATCHED, Kind
from qwen35_operator.kube.store import Key, Store
from qwen35_operator.kube.watch import Watch, not_listed
from qwen35_trainer.spec import Problem


class Cluster:
    """The children of all trainings.

    `changed` is told of every training for which there is news; `recovered`, that a kind can be seen again.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        changed: Callable[[Key], None],
        restarted: Callable[[str], None],
        recovered: Callable[[], None] = lambda: None,
    ) -> None:
        self.stores: dict[Kind, Store] = {kind: Store() for kind in WATCHED}
        self.watches = [
            Watch(kind, namespace, self.stores[kind], changed, restarted, recovered)
            for kind in WATCHED
            for namespace in (namespaces or (None,))
        ]

    async def run(self, client: RestClient) -> None:
        """All watches, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self.watches:
                tasks.create_task(watch.run(client))

    async def settled(self) -> None:
        """Return once every watch has seen everything, or knows that it cannot."""
        await asyncio.gather(*(watch.settled.wait() for watch in self.watches))

    def unseen(self) -> list[Problem]:
        """Of what there is no complete list, and why."""
        blind = (watch for watch in self.watches if not watch.synced.is_set())
        return [watch.problem or not_listed(watch.kind) for watch in blind]

    def problems(self, namespace: str) -> tuple[Problem, ...]:
        """What cannot be seen of a namespace, and why."""
        relevant = [watch for watch in self.watches if watch.namespace in (None, namespace)]
        return tuple(watch.problem for watch in relevant if watch.problem is not None)
