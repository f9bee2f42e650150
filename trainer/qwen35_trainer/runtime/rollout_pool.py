"""The rollout pool: starts replicas, loads weights, submits sequences, and replaces replicas that are lost.

    spawn ─► ready ─► load ─► joined ─► collect, collect, … ──► lost ─► spawn another, up to the target
                       ▲                                          ▲
                   newest weights                     its process ended, its engine failed, or a call reached its deadline

Calls reach a replica in the order in which they are made. The loss of a replica is reported once; its other calls end without an
error, because the coordinator moves its sequences to another replica.
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
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import GeneratedTokens, SequenceRequest
from qwen35_trainer.runtime.calls import ActorLost, Stalled, answer
from qwen35_trainer.runtime.rollout_worker import Collected, EngineFailed
from qwen35_trainer.weights.published import PublishedWeights

logger = logging.getLogger(__name__)

COLLECT_SECONDS = 1.0
"""Maximum wait of one collect call: first tokens and progress are reported at least this often."""
MAX_LOSSES_IN_A_ROW = 3
"""Consecutive losses of one replica, without a finished sequence in between, after which the run fails."""


LANE_PREFIX, POOL_PREFIX = "lane-", "rollout-"


def replica_names(count: int, *, lane: bool = False) -> list[str]:
    """Return the names of the first `count` replicas: of the straggler lane if `lane`, else of the rollout pool."""
    return [f"{LANE_PREFIX if lane else POOL_PREFIX}{index}" for index in range(count)]


class PoolListener(Protocol):
    """The interface through which the rollout pool reports joined and lost replicas, tokens and finished sequences."""

    def tell(self, event: on.Event) -> None: ...

    def collected(self, replica: RolloutReplica, collected: Collected) -> None: ...

    def lost(self, replica: RolloutReplica) -> None: ...


@dataclass(eq=False)
class RolloutReplica:
    """One actor that holds a replica. The coordinator identifies it by `number`.

    The actor that replaces a lost one has the same name and another number.
    """

    number: int
    name: str
    actor: Any
    lane: bool = False
    host: str = ""
    version: int = -1


@dataclass(frozen=True)
class PoolLimits:
    """The number of sequences per replica, and deadlines in seconds."""

    slots: int
    start: float
    call: float
    publish: float


class RolloutPool:
    """Keeps `target` replicas running, and `lanes` replicas in the straggler lane. `spawn(number, name, lane)` starts one."""

    def __init__(
        self,
        spawn: Callable[[int, str, bool], RolloutReplica],
        listener: PoolListener,
        limits: PoolLimits,
        *,
        target: int,
        lanes: int = 0,
    ) -> None:
        self._spawn, self._listener, self._limits = spawn, listener, limits
        self._target, self._lanes = target, lanes
        self._replicas: dict[int, RolloutReplica] = {}  # by number; joined
        self._names: set[str] = set()  # of replicas that have joined or are starting
        self._next = 0
        self._newest: PublishedWeights | None = None
        self._leaving: frozenset[str] = frozenset()
        self._losses: Counter[str] = Counter()  # by name, since its last finished sequence
        self._resized = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def hosts(self) -> dict[str, str]:
        """The host of each replica by the replica's name. In a cluster, the host is the pod."""
        return {replica.name: replica.host for replica in self._replicas.values()}

    @property
    def names(self) -> dict[int, str]:
        """The names of all replicas by number."""
        return {number: replica.name for number, replica in self._replicas.items()}

    def run(self, tasks: asyncio.TaskGroup, weights: PublishedWeights, first: Iterable[RolloutReplica]) -> None:
        """Start the tasks of the pool in the task group `tasks`.

        weights: the version that replicas load first. first: replicas whose actors have been started.
        """
        self._tasks, self._newest = tasks, weights
        for replica in first:
            self._next = max(self._next, replica.number + 1)
            self._names.add(replica.name)
            tasks.create_task(self._live(replica))
        self._fill()
        tasks.create_task(self._refill())

    def resize(self, target: int) -> None:
        """Set the number of replicas to keep running. Replicas above it stay until their hosts are removed."""
        self._target = target
        self._resized.set()

    def leave(self, hosts: frozenset[str]) -> None:
        """Send no new sequences to replicas on `hosts`, if the pool has a replica on another host.

        Each call replaces the previous set of hosts: replicas on other hosts take sequences again.
        """
        self._leaving = hosts
        staying = [replica for replica in self._replicas.values() if not replica.lane and replica.host not in hosts]
        for replica in self._replicas.values():
            self._listener.tell(on.ReplicaLeaving(replica.number, bool(staying) and replica.host in hosts))

    def submit(self, number: int, requests: Sequence[SequenceRequest]) -> None:
        """Send sequences to a replica. Does nothing for a lost one: the coordinator learns of the loss, and moves the sequences."""
        replica = self._replicas.get(number)
        if replica is None:
            return
        call = replica.actor.submit.remote(requests)
        self._watch(self._answer(replica, call, "submitting sequences", self._limits.call))

    def cancel(self, number: int, sequences: Sequence[SequenceId]) -> None:
        """Drop sequences of a replica without waiting for their tokens."""
        self._watch(self.take(number, sequences))

    async def take(self, number: int, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens] | None:
        """Drop sequences of a replica, and return the tokens that they had; None when the replica is lost."""
        replica = self._replicas.get(number)
        if replica is None:
            return None
        taken: dict[SequenceId, GeneratedTokens] | None = await self._answer(
            replica, replica.actor.take.remote(sequences), "returning sequences", self._limits.call
        )
        return taken

    def publish(self, weights: PublishedWeights) -> None:
        """Send new weights to all replicas at the same time, without draining them. An event reports each replica that has loaded them."""
        self._newest = weights
        for replica in self._replicas.values():
            self._watch(self._load(replica, weights))

    async def _refill(self) -> None:
        """Start missing replicas after each change of the target, until this task is cancelled."""
        while True:
            await self._resized.wait()
            self._resized.clear()
            self._fill()

    def _fill(self) -> None:
        """Start the replicas that are missing from the targets."""
        assert self._tasks is not None
        for lane, target in ((False, self._target), (True, self._lanes)):
            names = replica_names(target, lane=lane)
            present = sum(name.startswith(LANE_PREFIX) == lane for name in self._names)
            for name in [name for name in names if name not in self._names][: max(0, target - present)]:
                self._names.add(name)
                number, self._next = self._next, self._next + 1
                self._tasks.create_task(self._live(self._spawn(number, name, lane)))

    async def _live(self, replica: RolloutReplica) -> None:
        """Let a replica join, then collect from it until it is lost."""
        try:
            await self._join(replica)
            while True:
                call = replica.actor.collect.remote(COLLECT_SECONDS)
                collected: Collected = await answer(
                    call, of=replica.name, act="generating", seconds=COLLECT_SECONDS + self._limits.call
                )
                if collected.finished:
                    del self._losses[replica.name]
                self._listener.collected(replica, collected)
        except (ActorLost, Stalled, EngineFailed) as error:
            self._lose(replica, error)

    async def _join(self, replica: RolloutReplica) -> None:
        replica.host = await answer(
            replica.actor.ready.remote(), of=replica.name, act="loading the model", seconds=self._limits.start
        )
        assert self._newest is not None
        while (
            replica.version < (weights := self._newest).manifest.version
        ):  # newer weights may be published while it loads
            await self._send(replica, weights)
            replica.version = weights.manifest.version
        self._replicas[replica.number] = replica
        self._listener.tell(on.ReplicaJoined(replica.number, self._limits.slots, replica.version, replica.lane))
        if self._leaving:
            self.leave(self._leaving)

    def _lose(self, replica: RolloutReplica, error: Exception) -> None:
        """Report a lost replica, and start another. Raises ActorLost after MAX_LOSSES_IN_A_ROW losses of one name."""
        ray.kill(replica.actor)  # it may hang
        self._names.discard(replica.name)
        self._losses[replica.name] += 1
        if (losses := self._losses[replica.name]) >= MAX_LOSSES_IN_A_ROW:
            raise ActorLost(f"{replica.name} was lost {losses} times in a row; the last: {error}") from error
        logger.warning("%s; its sequences continue on other replicas", error)
        if self._replicas.pop(replica.number, None) is not None:
            self._listener.lost(replica)
            if self._leaving:
                self.leave(self._leaving)
        self._fill()

    async def _load(self, replica: RolloutReplica, weights: PublishedWeights) -> None:
        version = weights.manifest.version
        if await self._guarded(replica, self._send(replica, weights)) and replica.version < version:
            replica.version = version
            self._listener.tell(on.VersionLoaded(replica.number, version))

    async def _send(self, replica: RolloutReplica, weights: PublishedWeights) -> None:
        await answer(
            replica.actor.load.remote(weights.manifest, *weights.buckets),
            of=replica.name,
            act=f"loading version {weights.manifest.version}",
            seconds=self._limits.publish,
        )

    async def _answer(self, replica: RolloutReplica, call: Any, act: str, seconds: float) -> Any:  # noqa: ANN401  # Ray's, untyped
        answers: list[Any] = []

        async def wait() -> None:
            answers.append(await answer(call, of=replica.name, act=act, seconds=seconds))

        return answers[0] if await self._guarded(replica, wait()) else None

    async def _guarded(self, replica: RolloutReplica, call: Any) -> bool:  # noqa: ANN401  # a coroutine
        """Return whether the call was answered. A replica that does not answer is killed, and `_live` then reports its loss."""
        try:
            await call
        except ActorLost:
            return False
        except Stalled as error:
            logger.warning("%s", error)
            ray.kill(replica.actor)
            return False
        return replica.number in self._replicas

    def _watch(self, work: Any) -> None:  # noqa: ANN401  # a coroutine
        """Run a coroutine as a task. An error in it ends the run."""
        assert self._tasks is not None
        self._tasks.create_task(work)
