"""The rollout pool: replicas come, load weights, are told what to do, and are replaced when they are lost.

    spawn ─► ready ─► load ─► joined ─► collect, collect, … ──► lost ─► spawn another, as long as the target asks for it
                       ▲                                          ▲
                   newest weights                     its process ended, its engine failed, or a call reached its deadline

Calls to one replica reach it in the order in which they are made. A lost replica is told of once; whatever else was
under way on it ends silently, since the coordinator gives its sequences to another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from qwen35_trainer.pipeline import events as on
from qwen35_trainer.rollout.base import SequenceId, SequenceRequest, Tokens
from qwen35_trainer.runtime.calls import Stalled, WorkerLost, answer
from qwen35_trainer.runtime.rollout_worker import Collected, EngineFailed
from qwen35_trainer.weights.publication import Publication

logger = logging.getLogger(__name__)

COLLECT_SECONDS = 1.0
"""Longest wait of one collect call: births and tokens arrive at least this often."""
MOST_LOSSES = 3
"""Losses of one replica in a row, without a sequence that it finished between them, after which the run fails."""


LANE, POOL = "lane-", "rollout-"


def replica_names(count: int, *, lane: bool = False) -> list[str]:
    """The names of so many replicas."""
    return [f"{LANE if lane else POOL}{index}" for index in range(count)]


class Crew(Protocol):
    """Who hears of the replicas."""

    def tell(self, event: on.Event) -> None: ...

    def collected(self, replica: Replica, news: Collected) -> None: ...

    def lost(self, replica: Replica) -> None: ...


@dataclass(eq=False)
class Replica:
    """One life of a replica. `number` is the coordinator's: another life has another."""

    number: int
    name: str
    actor: Any
    lane: bool = False
    host: str = ""
    version: int = -1


@dataclass(frozen=True)
class Limits:
    """Deadlines, in seconds, and the sequences that a replica takes."""

    slots: int
    start: float
    call: float
    publish: float


class RolloutPool:
    """`spawn(number, name, lane)` starts a replica's actor. There are to be `target` of them, and `lanes` in the lane."""

    def __init__(
        self, spawn: Callable[[int, str, bool], Replica], crew: Crew, limits: Limits, *, target: int, lanes: int = 0
    ) -> None:
        self._spawn, self._crew, self._limits = spawn, crew, limits
        self._target, self._lanes = target, lanes
        self._replicas: dict[int, Replica] = {}  # by number; joined
        self._names: set[str] = set()  # taken, by replicas joined or on their way
        self._next = 0
        self._newest: Publication | None = None
        self._leaving: frozenset[str] = frozenset()
        self._losses: Counter[str] = Counter()  # by name, since its last finished sequence
        self._resized = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def hosts(self) -> dict[str, str]:
        """Replica → the host where it runs, in a cluster the pod."""
        return {replica.name: replica.host for replica in self._replicas.values()}

    @property
    def names(self) -> dict[int, str]:
        """Number → name."""
        return {number: replica.name for number, replica in self._replicas.items()}

    def run(self, tasks: asyncio.TaskGroup, weights: Publication, first: Iterable[Replica]) -> None:
        """Begin with `first`, whose actors have started, and with these weights. Its tasks belong to `tasks`."""
        self._tasks, self._newest = tasks, weights
        for replica in first:
            self._next = max(self._next, replica.number + 1)
            self._names.add(replica.name)
            tasks.create_task(self._live(replica))
        self._fill()
        tasks.create_task(self._refill())

    def resize(self, target: int) -> None:
        """From now on there are to be so many replicas. Those too many leave when their hosts do."""
        self._target = target
        self._resized.set()

    def leave(self, hosts: frozenset[str]) -> None:
        """Replicas on these hosts take no more sequences, as long as there is one elsewhere; others do again."""
        self._leaving = hosts
        staying = [replica for replica in self._replicas.values() if not replica.lane and replica.host not in hosts]
        for replica in self._replicas.values():
            self._crew.tell(on.WorkerLeaving(replica.number, bool(staying) and replica.host in hosts))

    def submit(self, number: int, requests: Sequence[SequenceRequest]) -> None:
        """Hand out sequences. A lost replica gets none: the coordinator is told of it, and asks again."""
        replica = self._replicas.get(number)
        if replica is None:
            return
        call = replica.actor.submit.remote(requests)
        self._watch(self._answer(replica, call, "submitting sequences", self._limits.call))

    def cancel(self, number: int, sequences: Sequence[SequenceId]) -> None:
        """Drop sequences."""
        self._watch(self.take(number, sequences))

    async def take(self, number: int, sequences: Sequence[SequenceId]) -> dict[SequenceId, Tokens] | None:
        """Drop sequences and give their tokens; None when the replica is lost meanwhile."""
        replica = self._replicas.get(number)
        if replica is None:
            return None
        taken: dict[SequenceId, Tokens] | None = await self._answer(
            replica, replica.actor.take.remote(sequences), "handing over sequences", self._limits.call
        )
        return taken

    def publish(self, weights: Publication) -> None:
        """Give every replica new weights, at the same time and without draining. Each tells when it has them."""
        self._newest = weights
        for replica in self._replicas.values():
            self._watch(self._load(replica, weights))

    async def _refill(self) -> None:
        """Fill up after each change of size, until cancelled: a change that comes too late is none."""
        while True:
            await self._resized.wait()
            self._resized.clear()
            self._fill()

    def _fill(self) -> None:
        """Start what is missing."""
        assert self._tasks is not None
        for lane, target in ((False, self._target), (True, self._lanes)):
            names = replica_names(target, lane=lane)
            present = sum(name.startswith(LANE) == lane for name in self._names)
            for name in [name for name in names if name not in self._names][: max(0, target - present)]:
                self._names.add(name)
                number, self._next = self._next, self._next + 1
                self._tasks.create_task(self._live(self._spawn(number, name, lane)))

    async def _live(self, replica: Replica) -> None:
        """All of a replica's life."""
        try:
            await self._join(replica)
            while True:
                call = replica.actor.collect.remote(COLLECT_SECONDS)
                news: Collected = await answer(
                    call, of=replica.name, act="generating", seconds=COLLECT_SECONDS + self._limits.call
                )
                if news.finished:
                    del self._losses[replica.name]
                self._crew.collected(replica, news)
        except (WorkerLost, Stalled, EngineFailed) as error:
            self._lose(replica, error)

    async def _join(self, replica: Replica) -> None:
        replica.host = await answer(
            replica.actor.ready.remote(), of=replica.name, act="loading the model", seconds=self._limits.start
        )
        assert self._newest is not None
        while replica.version < (weights := self._newest).manifest.version:  # newer ones may come while it loads
            await self._send(replica, weights)
            replica.version = weights.manifest.version
        self._replicas[replica.number] = replica
        self._crew.tell(on.WorkerJoined(replica.number, self._limits.slots, replica.version, replica.lane))
        if self._leaving:
            self.leave(self._leaving)

    def _lose(self, replica: Replica, error: Exception) -> None:
        """Told of, and replaced. Raises WorkerLost when one after the other is lost."""
        ray.kill(replica.actor)  # it may hang
        self._names.discard(replica.name)
        self._losses[replica.name] += 1
        if (losses := self._losses[replica.name]) >= MOST_LOSSES:
            raise WorkerLost(f"{replica.name} was lost {losses} times in a row; the last: {error}") from error
        logger.warning("%s; its sequences go on elsewhere", error)
        if self._replicas.pop(replica.number, None) is not None:
            self._crew.lost(replica)
            if self._leaving:
                self.leave(self._leaving)
        self._fill()

    async def _load(self, replica: Replica, weights: Publication) -> None:
        version = weights.manifest.version
        if await self._guarded(replica, self._send(replica, weights)) and replica.version < version:
            replica.version = version
            self._crew.tell(on.Loaded(replica.number, version))

    async def _send(self, replica: Replica, weights: Publication) -> None:
        await answer(
            replica.actor.load.remote(weights.manifest, *weights.buckets),
            of=replica.name,
            act=f"loading version {weights.manifest.version}",
            seconds=self._limits.publish,
        )

    async def _answer(self, replica: Replica, call: Any, act: str, seconds: float) -> Any:  # noqa: ANN401  # Ray's, untyped
        answers: list[Any] = []

        async def wait() -> None:
            answers.append(await answer(call, of=replica.name, act=act, seconds=seconds))

        return answers[0] if await self._guarded(replica, wait()) else None

    async def _guarded(self, replica: Replica, call: Any) -> bool:  # noqa: ANN401  # a coroutine
        """Whether the call was answered. A replica that does not answer is ended: its `_live` finds it lost."""
        try:
            await call
        except WorkerLost:
            return False
        except Stalled as error:
            logger.warning("%s", error)
            ray.kill(replica.actor)
            return False
        return replica.number in self._replicas

    def _watch(self, work: Any) -> None:  # noqa: ANN401  # a coroutine
        """Let it run; what it raises ends the run."""
        assert self._tasks is not None
        self._tasks.create_task(work)
