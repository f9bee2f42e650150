"""The rollout pool as the loop sees it: N replicas, each with its load and its version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwen35_trainer.rollout.base import GroupRequest
from qwen35_trainer.runtime.calls import answer, answers
from qwen35_trainer.runtime.rollout_worker import Collected
from qwen35_trainer.weights.publication import Publication

COLLECT_SECONDS = 1.0
"""Longest wait of one collect call: births and token counts arrive at least this often."""


@dataclass
class _Replica:
    actor: Any
    name: str
    host: str
    groups: dict[int, int] = field(default_factory=dict)  # group → its sequences

    @property
    def load(self) -> int:
        return sum(self.groups.values())


class RolloutPool:
    """Sends each group to the replica with the fewest sequences. `hosts` are where the actors run, in their order."""

    def __init__(
        self, actors: Sequence[Any], hosts: Sequence[str], *, call_seconds: float, publish_seconds: float
    ) -> None:
        self._replicas = [
            _Replica(actor, f"rollout-{index}", host)
            for index, (actor, host) in enumerate(zip(actors, hosts, strict=True))
        ]
        self._call_seconds, self._publish_seconds = call_seconds, publish_seconds
        self.version = 0
        """Every replica has at least these weights."""
        self.leaving: frozenset[str] = frozenset()
        """Hosts whose replicas get no more groups, as long as there is another; what they hold they finish."""

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def hosts(self) -> dict[str, str]:
        """Replica → host."""
        return {replica.name: replica.host for replica in self._replicas}

    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Hand out groups."""
        shares: dict[int, list[GroupRequest]] = {}
        staying = [index for index, replica in enumerate(self._replicas) if replica.host not in self.leaving]
        for request in requests:
            index = min(staying or range(len(self._replicas)), key=lambda i: self._replicas[i].load)
            self._replicas[index].groups[request.group] = request.samples
            shares.setdefault(index, []).append(request)
        await asyncio.gather(
            *(
                answer(
                    self._replicas[index].actor.submit.remote(share),
                    of=self._replicas[index].name,
                    act="submitting groups",
                    seconds=self._call_seconds,
                )
                for index, share in shares.items()
            )
        )

    async def cancel(self, groups: Sequence[int]) -> None:
        """Drop groups wherever they are."""
        for replica in self._replicas:
            held = [group for group in groups if replica.groups.pop(group, None) is not None]
            if held:
                await answer(
                    replica.actor.cancel.remote(held),
                    of=replica.name,
                    act="dropping groups",
                    seconds=self._call_seconds,
                )

    async def publish(self, weights: Publication) -> None:
        """Give every replica new weights, at the same time and without draining. Returns when all have them."""
        await answers(
            [replica.actor.load.remote(weights.manifest, *weights.buckets) for replica in self._replicas],
            of="the rollout pool",
            act=f"loading version {weights.manifest.version}",
            seconds=self._publish_seconds,
        )
        self.version = weights.manifest.version

    async def collect(self, index: int) -> AsyncIterator[Collected]:
        """What replica `index` does, as it does it, for ever."""
        replica = self._replicas[index]
        while True:
            collected: Collected = await answer(
                replica.actor.collect.remote(COLLECT_SECONDS),
                of=replica.name,
                act="generating",
                seconds=COLLECT_SECONDS + self._call_seconds,
            )
            for result in collected.finished:
                replica.groups.pop(result.group, None)
            yield collected
