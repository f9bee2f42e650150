"""Replicas come, load, are lost and replaced. They are stand-ins for the remote actors, with the calls that the pool makes.

All that happens here waits for time alone, so the clock is virtual: deadlines pass immediately, and no other load on the machine
makes a replica late.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, Completed, GeneratedTokens, SequenceRequest
from qwen35_trainer.runtime.rollout_pool import (
    MAX_LOSSES_IN_A_ROW,
    PoolLimits,
    RolloutPool,
    RolloutReplica,
    replica_names,
)
from qwen35_trainer.runtime.rollout_worker import Collected, EngineFailed
from qwen35_trainer.weights.published import PublishedWeights
from qwen35_trainer.weights.weight_manifest import WeightManifest
from tests.operator.kube import virtual
from tests.patience import PATIENCE

FINISHED = Collected(finished=(Completed((0, 0), NO_TOKENS, truncated=False),))
REQUEST = SequenceRequest((0, 0), (3,), 8)


class Call:
    """`actor.method.remote(…)`: under way immediately, answered unless the actor dies before."""

    def __init__(self, actor: "Actor", act: Callable[..., Coroutine[Any, Any, object]]) -> None:
        self._actor, self._act = actor, act

    def remote(self, *arguments: object) -> asyncio.Future[object]:
        return asyncio.ensure_future(self._answer(*arguments))

    async def _answer(self, *arguments: object) -> object:
        work = asyncio.ensure_future(self._act(*arguments))
        died = asyncio.ensure_future(self._actor.died.wait())
        await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if self._actor.died.is_set():
            work.cancel()
            raise RayActorError(error_msg="its process ended")
        return work.result()


class Actor:
    """A replica's process. `hangs` names methods that never answer; `loading` is unset while `load` takes its time."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.died, self.loading = asyncio.Event(), asyncio.Event()
        self.loading.set()
        self.hangs: set[str] = set()
        self.news: asyncio.Queue[Collected | Exception] = asyncio.Queue()
        self.loaded: list[int] = []
        self.submitted: list[SequenceId] = []

    def __getattr__(self, name: str) -> Call:
        return Call(self, getattr(type(self), f"do_{name}").__get__(self))

    async def do_ready(self) -> str:
        await self._hang("ready")
        return self.host

    async def do_load(self, manifest: WeightManifest, *buckets: object) -> None:
        await self._hang("load")
        await self.loading.wait()
        self.loaded.append(manifest.version)

    async def do_collect(self, wait_seconds: float) -> Collected:
        try:
            news = await asyncio.wait_for(self.news.get(), wait_seconds)
        except TimeoutError:
            return Collected()
        if isinstance(news, Exception):
            raise news
        return news

    async def do_submit(self, requests: list[SequenceRequest]) -> None:
        await self._hang("submit")
        self.submitted += [request.sequence for request in requests]

    async def do_take(self, sequences: list[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        await self._hang("take")
        return dict.fromkeys(sequences, NO_TOKENS)

    async def _hang(self, method: str) -> None:
        if method in self.hangs:
            await asyncio.Event().wait()


class Crew:
    """The listener that gets the events of replicas."""

    def __init__(self) -> None:
        self.events: list[on.Event] = []
        self.news: list[tuple[int, Collected]] = []
        self.losses: list[int] = []

    def tell(self, event: on.Event) -> None:
        self.events.append(event)

    def collected(self, replica: RolloutReplica, news: Collected) -> None:
        self.news.append((replica.number, news))

    def lost(self, replica: RolloutReplica) -> None:
        self.losses.append(replica.number)

    def of[E](self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def leaving(self) -> dict[int, bool]:
        """The last order to each replica."""
        return {event.replica: event.leaving for event in self.of(on.ReplicaLeaving)}


class Over(Exception):
    """Ends the tasks of a pool."""


def end() -> None:
    raise Over


class Cluster:
    """A pool, and the processes that it started. Replica n is on the host `pod-n` unless `hosts` says otherwise."""

    def __init__(self, *, target: int = 1, lanes: int = 0, seconds: float = PATIENCE) -> None:
        self.crew = Crew()
        self.actors: dict[int, Actor] = {}
        self.hosts: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.prepare: Callable[[Actor], None] = lambda actor: None
        limits = PoolLimits(slots=5, start=seconds, call=seconds, publish=seconds)
        self.pool = RolloutPool(self.spawn, self.crew, limits, target=target, lanes=lanes)

    def spawn(self, number: int, name: str, lane: bool) -> RolloutReplica:
        self.actors[number] = Actor(self.hosts.get(number, f"pod-{number}"))
        self.names[number] = name
        self.prepare(self.actors[number])
        return RolloutReplica(number, name, self.actors[number], lane)

    @asynccontextmanager
    async def running(self, version: int = 0, first: Iterable[RolloutReplica] = ()) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as tasks:
                self.pool.run(tasks, weights(version), first)
                yield
                end()
        except* Over:
            pass

    async def joined(self, count: int) -> None:
        """Until this number of replicas has joined, counted from the start."""
        await until(lambda: len(self.crew.of(on.ReplicaJoined)) >= count)


def weights(version: int) -> PublishedWeights:
    return PublishedWeights(WeightManifest(version, (), ()), ())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110, anything may make it true
            await asyncio.sleep(0.001)


async def settled() -> None:
    """Everything that can happen without time has happened."""
    for _ in range(50):
        await asyncio.sleep(0)


class _Virtual(asyncio.DefaultEventLoopPolicy):
    _loop_factory = virtual.Loop


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return _Virtual()


@pytest.fixture(autouse=True)
def killing(monkeypatch) -> None:
    """Ray ends stand-ins as it ends actors."""
    monkeypatch.setattr(ray, "kill", lambda actor: actor.died.set())


async def test_a_replica_joins_with_the_weights_loaded():
    cluster = Cluster(target=2, lanes=1)
    async with cluster.running(version=3):
        await cluster.joined(3)
    assert [actor.loaded for actor in cluster.actors.values()] == [[3]] * 3
    assert sorted(cluster.crew.of(on.ReplicaJoined), key=lambda event: event.replica) == [
        on.ReplicaJoined(0, 5, 3),
        on.ReplicaJoined(1, 5, 3),
        on.ReplicaJoined(2, 5, 3, lane=True),
    ]
    assert cluster.pool.hosts == {"rollout-0": "pod-0", "rollout-1": "pod-1", "lane-0": "pod-2"}
    assert cluster.pool.names == {0: "rollout-0", 1: "rollout-1", 2: "lane-0"}


async def test_replicas_whose_actors_started_before_are_not_started_again():
    cluster = Cluster(target=2)
    first = [cluster.spawn(number, name, lane=False) for number, name in enumerate(replica_names(2))]
    async with cluster.running(first=first):
        await cluster.joined(2)
        cluster.actors[0].died.set()
        await cluster.joined(3)
    assert cluster.names == {0: "rollout-0", 1: "rollout-1", 2: "rollout-0"}


async def test_events_reach_the_crew_with_the_replica_that_sent_them():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[1].news.put_nowait(FINISHED)
        await until(lambda: bool(cluster.crew.news))
    assert cluster.crew.news[0] == (1, FINISHED)


async def test_every_replica_reports_when_it_has_loaded_a_publication():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[0].loading.clear()
        cluster.pool.publish(weights(1))
        await settled()
        assert cluster.crew.of(on.VersionLoaded) == [on.VersionLoaded(1, 1)]
        cluster.actors[0].loading.set()
        await until(lambda: len(cluster.crew.of(on.VersionLoaded)) == 2)
    assert cluster.crew.of(on.VersionLoaded)[1] == on.VersionLoaded(0, 1)


async def test_a_publication_that_comes_while_a_replica_loads_is_loaded_before_it_joins():
    cluster = Cluster()
    cluster.prepare = lambda actor: actor.loading.clear()
    async with cluster.running():
        await settled()
        cluster.pool.publish(weights(1))
        cluster.pool.publish(weights(2))
        cluster.actors[0].loading.set()
        await cluster.joined(1)
    assert cluster.actors[0].loaded == [0, 2]
    assert cluster.crew.events == [on.ReplicaJoined(0, 5, 2)]


async def test_a_lost_replica_is_reported_once_and_another_comes_in_its_place_with_the_newest_weights():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.publish(weights(4))
        await until(lambda: len(cluster.crew.of(on.VersionLoaded)) == 2)
        lost = cluster.actors[1]
        lost.hangs.add("take")
        taking = asyncio.create_task(cluster.pool.take(1, [(0, 0)]))
        cluster.pool.submit(1, [REQUEST])
        await settled()
        lost.died.set()
        assert await taking is None
        await cluster.joined(3)
        await settled()
        assert cluster.crew.losses == [1]
        assert len(cluster.pool) == 2
    assert cluster.names == {0: "rollout-0", 1: "rollout-1", 2: "rollout-1"}
    assert cluster.crew.of(on.ReplicaJoined)[-1] == on.ReplicaJoined(2, 5, 4)
    assert cluster.actors[2].loaded == [4]


async def test_a_replica_whose_engine_failed_is_ended_and_replaced():
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        cluster.actors[0].news.put_nowait(EngineFailed("rollout-0: RuntimeError: no memory"))
        await cluster.joined(2)
        assert cluster.actors[0].died.is_set()
    assert cluster.crew.losses == [0]


async def test_a_replica_lost_before_it_joined_is_replaced_without_a_report():
    cluster = Cluster()
    cluster.prepare = lambda actor: actor.loading.clear()
    async with cluster.running():
        await settled()
        cluster.prepare = lambda actor: None
        cluster.actors[0].died.set()
        await cluster.joined(1)
    assert cluster.crew.losses == []
    assert cluster.crew.events == [on.ReplicaJoined(1, 5, 0)]


async def test_a_lane_replica_is_replaced_by_a_lane_replica():
    cluster = Cluster(target=1, lanes=2)
    async with cluster.running():
        await cluster.joined(3)
        cluster.actors[2].died.set()
        await cluster.joined(4)
    assert cluster.names == {0: "rollout-0", 1: "lane-0", 2: "lane-1", 3: "lane-1"}
    assert cluster.crew.of(on.ReplicaJoined)[-1] == on.ReplicaJoined(3, 5, 0, lane=True)


async def test_one_loss_after_the_other_ends_the_run_with_the_last_reason():
    cluster = Cluster()

    async def lose_one_after_the_other() -> None:
        async with cluster.running():
            for number in range(MAX_LOSSES_IN_A_ROW):
                await cluster.joined(number + 1)
                cluster.actors[number].news.put_nowait(EngineFailed(f"reason {number}"))
            await cluster.joined(MAX_LOSSES_IN_A_ROW + 1)

    with pytest.raises(ExceptionGroup) as raised:
        await lose_one_after_the_other()
    [error] = raised.value.exceptions
    assert (
        str(error)
        == f"rollout-0 was lost {MAX_LOSSES_IN_A_ROW} times in a row; the last: reason {MAX_LOSSES_IN_A_ROW - 1}"
    )


async def test_a_node_that_takes_many_replicas_with_it_does_not_end_the_run():
    cluster = Cluster(target=MAX_LOSSES_IN_A_ROW + 1)
    async with cluster.running():
        await cluster.joined(MAX_LOSSES_IN_A_ROW + 1)
        for actor in list(cluster.actors.values()):
            actor.died.set()
        await cluster.joined(2 * (MAX_LOSSES_IN_A_ROW + 1))


async def test_losses_between_which_a_sequence_finished_are_not_in_a_row():
    cluster = Cluster()
    async with cluster.running():
        for number in range(2 * MAX_LOSSES_IN_A_ROW):
            await cluster.joined(number + 1)
            cluster.actors[number].news.put_nowait(FINISHED)
            cluster.actors[number].news.put_nowait(EngineFailed("again"))
        await cluster.joined(2 * MAX_LOSSES_IN_A_ROW + 1)


@pytest.mark.parametrize("method", ["submit", "take", "load"])
async def test_a_replica_with_a_call_that_hangs_is_ended_and_replaced(method):
    cluster = Cluster(seconds=2.0)
    async with cluster.running():
        await cluster.joined(1)
        cluster.actors[0].hangs.add(method)
        match method:
            case "submit":
                cluster.pool.submit(0, [REQUEST])
            case "take":
                assert await cluster.pool.take(0, [(0, 0)]) is None
            case "load":
                cluster.pool.publish(weights(1))
        await cluster.joined(2)
        assert cluster.actors[0].died.is_set()
    assert cluster.crew.losses == [0]
    assert cluster.crew.of(on.VersionLoaded) == []
    assert cluster.crew.of(on.ReplicaJoined)[-1].version == (1 if method == "load" else 0)


async def test_an_order_to_a_lost_replica_has_no_effect():
    """The coordinator may not have heard of it yet."""
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[0].died.set()
        await until(lambda: cluster.crew.losses == [0])
        cluster.pool.submit(0, [REQUEST])
        cluster.pool.cancel(0, [(0, 0)])
        assert await cluster.pool.take(0, [(0, 0)]) is None
        cluster.pool.submit(1, [REQUEST])
        await settled()
    assert (cluster.actors[0].submitted, cluster.actors[1].submitted) == ([], [(0, 0)])


async def test_the_pool_grows_immediately_and_shrinks_only_when_ordered():
    cluster = Cluster(target=1)
    cluster.pool.resize(2)  # before it began
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.resize(3)
        await cluster.joined(3)
        cluster.pool.resize(1)
        await settled()
        assert len(cluster.pool) == 3
        assert not any(actor.died.is_set() for actor in cluster.actors.values())
        # Of those too many, the lost are not replaced.
        cluster.actors[0].died.set()
        cluster.actors[2].died.set()
        await until(lambda: len(cluster.pool) == 1)
        await settled()
    cluster.pool.resize(9)  # after it ended
    await settled()
    assert cluster.names == {0: "rollout-0", 1: "rollout-1", 2: "rollout-2"}


async def test_replicas_on_leaving_hosts_take_no_more_and_take_again_when_these_stay():
    cluster = Cluster(target=3, lanes=1)
    cluster.hosts = {3: "pod-1"}
    async with cluster.running():
        await cluster.joined(4)
        cluster.pool.leave(frozenset({"pod-1"}))
        assert cluster.crew.leaving == {0: False, 1: True, 2: False, 3: True}
        cluster.pool.leave(frozenset())
        assert not any(cluster.crew.leaving.values())


async def test_nobody_leaves_when_all_would():
    cluster = Cluster(target=2, lanes=1)
    async with cluster.running():
        await cluster.joined(3)
        # The lane, which is to stay, takes stragglers only.
        cluster.pool.leave(frozenset({"pod-0", "pod-1", "pod-of-yesterday"}))
        assert not any(cluster.crew.leaving.values())


async def test_those_that_had_to_stay_leave_once_another_has_come():
    cluster = Cluster(target=1)
    async with cluster.running():
        await cluster.joined(1)
        cluster.pool.leave(frozenset({"pod-0"}))
        assert cluster.crew.leaving == {0: False}
        cluster.pool.resize(2)
        await cluster.joined(2)
        assert cluster.crew.leaving == {0: True, 1: False}


async def test_replicas_that_leave_continue_when_the_last_that_stayed_is_lost():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.leave(frozenset({"pod-0"}))
        assert cluster.crew.leaving == {0: True, 1: False}
        cluster.prepare = lambda actor: actor.loading.clear()
        cluster.actors[1].died.set()
        await until(lambda: cluster.crew.losses == [1])
        assert cluster.crew.leaving[0] is False
        cluster.actors[2].loading.set()
        await cluster.joined(3)
        assert cluster.crew.leaving[0] is True


async def test_a_replica_that_comes_on_a_leaving_host_takes_nothing():
    cluster = Cluster(target=2)
    cluster.pool.leave(frozenset({"pod-1"}))
    async with cluster.running():
        await cluster.joined(2)
        assert cluster.crew.leaving[1] is True
