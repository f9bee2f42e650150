"""Replicas come, load, are lost and replaced. They are stand-ins for the remote actors behind the real channel (replicas.py).

All that happens here waits for time alone, so the clock is virtual: deadlines pass immediately, and no other load on the machine
makes a replica late.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectFetchTimedOutError,
    ObjectLostError,
    OutOfMemoryError,
    WorkerCrashedError,
)

from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.rollout.rollout_engine import SequenceRequest
from qwen35_trainer.runtime import rollout_pool
from qwen35_trainer.runtime.replica_channel import (
    ANSWER_SECONDS,
    MAX_REPORT_SECONDS,
    UNREACHABLE_SECONDS,
    DropSequences,
    EngineReport,
    SubmitSequences,
    TakeSequences,
)
from qwen35_trainer.runtime.replica_node import NodeActors
from qwen35_trainer.runtime.rollout_pool import (
    LOSS_WINDOW_SECONDS,
    MAX_FAILED_STARTS,
    MAX_REPLACEMENT_DELAY_SECONDS,
    MAX_STEP_SECONDS,
    STEPS_PER_HANG,
    PoolLimits,
    RolloutPool,
    RolloutReplica,
    TooFewReplicas,
    replica_names,
)
from qwen35_trainer.runtime.rollout_worker import NotFiniteLogProbs
from qwen35_trainer.weights.probe import LogProbsDiffer, Probe, ProbeResult

from .replicas import Actor, Handle, VirtualTime, play, settled, until, weights

SUBMIT = SubmitSequences((SequenceRequest((0, 0), np.array([3], np.int32), 8),))
FINISHED = {"finished": {(0, 0): False}}
LIMITS = PoolLimits(slots=5, open=20.0, publish=30.0, too_few=300.0)


class Listener:
    """What the pool reports."""

    def __init__(self) -> None:
        self.events: list[on.Event] = []
        self.reports: list[tuple[int, EngineReport]] = []
        self.losses: list[int] = []

    def tell(self, event: on.Event) -> None:
        self.events.append(event)

    def reported(self, replica: RolloutReplica, report: EngineReport) -> None:
        self.reports.append((replica.number, report))

    def lost(self, replica: RolloutReplica) -> None:
        self.losses.append(replica.number)

    def of[E](self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def joined(self) -> list[int]:
        return [event.replica for event in self.of(on.ReplicaJoined)]

    @property
    def leaving(self) -> dict[int, bool]:
        """The last order to each replica."""
        return {event.replica: event.leaving for event in self.of(on.ReplicaLeaving)}


class Over(Exception):
    """Ends the tasks of a pool."""


def end() -> None:
    raise Over


class Cluster:
    """A pool, and the processes that it started. Replica n is on the host `pod-n` unless `hosts` says otherwise.

    prepare: called with each new process and its name.
    """

    def __init__(
        self,
        *,
        target: int = 1,
        minimum: int = 1,
        lanes: int = 0,
        limits: PoolLimits = LIMITS,
        takes_turns: bool = False,
    ) -> None:
        self.listener = Listener()
        self.actors: dict[int, Actor] = {}
        self.hosts: dict[int, str] = {}
        self.further_nodes = 0
        """Number of nodes of each replica besides the first one."""
        self.further: dict[int, list[Handle]] = {}
        self.names: dict[int, str] = {}
        self.started: list[float] = []
        self.prepare: Callable[[Actor, str], object] = lambda actor, name: None
        self.pool = RolloutPool(
            self.spawn,
            self.listener,
            limits,
            target=target,
            minimum=minimum,
            lanes=lanes,
            takes_turns=takes_turns,
        )

    def spawn(self, number: int, name: str, lane: bool) -> RolloutReplica:
        self.actors[number] = Actor(self.hosts.get(number, f"pod-{number}"))
        self.names[number] = name
        self.started.append(now())
        self.prepare(self.actors[number], name)
        nodes = range(1, 1 + self.further_nodes)
        self.actors[number].worker.further_hosts = tuple(f"pod-{number}-{node}" for node in nodes)
        self.further[number] = [Handle(None) for _ in nodes]
        further = NodeActors(tuple(self.further[number]), None) if nodes else None
        return RolloutReplica(number, name, self.actors[number], lane, further)

    @asynccontextmanager
    async def running(self, version: int = 0, first: Iterable[RolloutReplica] = ()) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as tasks:
                self.pool.run(tasks, weights(version), first)
                yield
                end()
        except* Over:
            pass

    async def failure(self, act: Callable[[], Awaitable[None]]) -> Exception:
        """The error that ends the run after `act`."""

        async def run() -> None:
            async with asyncio.timeout(10 * LIMITS.too_few), self.running():
                await act()
                await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as raised:
            await run()
        [error] = raised.value.exceptions
        return error

    async def joined(self, count: int) -> None:
        """Until this number of replicas has joined, counted from the start."""
        await until(lambda: len(self.listener.joined) >= count)

    async def worked(self, number: int) -> None:
        """Until this replica has joined and reported steps of its engine."""
        await until(lambda: number in self.listener.joined)
        self.pool.send(number, SUBMIT)
        await until(lambda: any(name == number and report.steps for name, report in self.listener.reports))

    async def ended(self, first: Iterable[RolloutReplica] = ()) -> TooFewReplicas:
        """The error with which the pool ends the run."""
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(10 * LIMITS.too_few), self.running(first=first):
                await asyncio.Event().wait()
        [error] = raised.value.exceptions
        assert isinstance(error, TooFewReplicas)
        return error


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return VirtualTime()


@pytest.fixture(autouse=True)
def _playing(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)


# Replicas join, report and load.


async def test_a_replica_joins_with_the_weights_loaded():
    cluster = Cluster(target=2, lanes=1)
    async with cluster.running(version=3):
        await cluster.joined(3)
    assert [actor.worker.loaded for actor in cluster.actors.values()] == [[3]] * 3
    assert sorted(cluster.listener.of(on.ReplicaJoined), key=lambda event: event.replica) == [
        on.ReplicaJoined(0, 5, 3),
        on.ReplicaJoined(1, 5, 3),
        on.ReplicaJoined(2, 5, 3, lane=True),
    ]
    assert cluster.pool.hosts == {"rollout-0": ("pod-0",), "rollout-1": ("pod-1",), "lane-0": ("pod-2",)}
    assert cluster.pool.names == {0: "rollout-0", 1: "rollout-1", 2: "lane-0"}


async def test_replicas_whose_actors_started_before_are_not_started_again():
    cluster = Cluster(target=2)
    first = [cluster.spawn(number, name, lane=False) for number, name in enumerate(replica_names(2))]
    async with cluster.running(first=first):
        await cluster.joined(2)
        cluster.actors[0].die()
        await cluster.joined(3)
    assert cluster.names == {0: "rollout-0", 1: "rollout-1", 2: "rollout-0"}


async def test_a_replica_that_is_ready_joins_without_waiting_for_the_others():
    cluster = Cluster(target=3)
    cluster.prepare = lambda actor, name: name != "rollout-1" and actor.worker.opening.clear()
    async with cluster.running():
        await settled()
        assert cluster.listener.joined == [1]


async def test_reports_reach_the_listener_with_the_replica_that_sent_them():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[1].engine.tell(**FINISHED)
        await until(lambda: any(report.finished for _, report in cluster.listener.reports))
    [(number, report)] = [(number, report) for number, report in cluster.listener.reports if report.finished]
    assert (number, report.finished) == (1, FINISHED["finished"])


async def test_commands_reach_the_replica_that_they_are_for():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.send(0, SUBMIT)
        cluster.pool.send(0, TakeSequences(((0, 0),)))
        cluster.pool.send(1, DropSequences(((0, 1),)))
        await until(lambda: cluster.actors[1].engine.dropped)
    first, second = (actor.engine for actor in cluster.actors.values())
    assert (first.submitted, first.asked_back, first.dropped) == ([(0, 0)], [(0, 0)], [])
    assert (second.submitted, second.asked_back, second.dropped) == ([], [], [(0, 1)])


async def test_every_replica_reports_when_it_has_loaded_a_publication():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[0].worker.loading.clear()
        cluster.pool.publish(weights(1))
        await until(lambda: cluster.listener.of(on.VersionLoaded))
        await asyncio.sleep(1.0)
        assert cluster.listener.of(on.VersionLoaded) == [on.VersionLoaded(1, 1)]
        cluster.actors[0].worker.loading.set()
        await until(lambda: len(cluster.listener.of(on.VersionLoaded)) == 2)
    assert cluster.listener.of(on.VersionLoaded)[1] == on.VersionLoaded(0, 1)


async def test_a_publication_that_comes_while_a_replica_loads_is_loaded_before_it_joins():
    cluster = Cluster()
    cluster.prepare = lambda actor, name: actor.worker.loading.clear()
    async with cluster.running():
        await settled()
        cluster.pool.publish(weights(1))
        cluster.pool.publish(weights(2))
        cluster.actors[0].worker.loading.set()
        await cluster.joined(1)
    assert cluster.actors[0].worker.loaded == [0, 2]
    assert cluster.listener.events == [on.ReplicaJoined(0, 5, 2)]


async def test_a_version_is_in_use_until_every_replica_has_a_later_one_or_is_lost():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        assert cluster.pool.versions_in_use == {0}
        cluster.actors[0].worker.loading.clear()
        for version in (1, 2):
            cluster.pool.publish(weights(version))
            await until(lambda newest=version: on.VersionLoaded(1, newest) in cluster.listener.events)
            assert cluster.pool.versions_in_use == set(range(version + 1)), "replica 0 still has version 0"
        cluster.actors[0].die()
        await until(lambda: 0 in cluster.listener.losses)
        assert cluster.pool.versions_in_use == {2}


async def test_a_version_that_a_replica_fetches_before_it_joins_is_in_use():
    cluster = Cluster()
    cluster.prepare = lambda actor, name: actor.worker.loading.clear()
    async with cluster.running():
        await settled()
        cluster.pool.publish(weights(3))
        assert cluster.pool.versions_in_use == {0, 3}
        cluster.actors[0].worker.loading.set()
        await cluster.joined(1)
        assert cluster.pool.versions_in_use == {3}


async def test_a_lane_replica_is_replaced_by_a_lane_replica():
    cluster = Cluster(target=1, lanes=2)
    async with cluster.running():
        await cluster.joined(3)
        cluster.actors[2].die()
        await cluster.joined(4)
    assert cluster.names == {0: "rollout-0", 1: "lane-0", 2: "lane-1", 3: "lane-1"}
    assert cluster.listener.of(on.ReplicaJoined)[-1] == on.ReplicaJoined(3, 5, 0, lane=True)


# A loss.


async def test_a_lost_replica_is_reported_once_and_another_comes_in_its_place_with_the_newest_weights():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.publish(weights(4))
        await until(lambda: len(cluster.listener.of(on.VersionLoaded)) == 2)
        lost = cluster.actors[1]
        lost.hangs.add("obey")
        cluster.pool.send(1, SUBMIT)  # under way when it is lost
        await settled()
        lost.die()
        await cluster.joined(3)
        await asyncio.sleep(2 * ANSWER_SECONDS)
        assert cluster.listener.losses == [1]
        assert len(cluster.pool) == 2
        assert lost.killed, "it may run, and hold the device"
    assert cluster.names == {0: "rollout-0", 1: "rollout-1", 2: "rollout-1"}
    assert cluster.listener.of(on.ReplicaJoined)[-1] == on.ReplicaJoined(2, 5, 4)
    assert cluster.actors[2].worker.loaded == [4]


async def test_a_replica_lost_before_it_joined_is_replaced_without_a_report():
    cluster = Cluster()
    cluster.prepare = lambda actor, name: actor.worker.loading.clear()
    async with cluster.running():
        await settled()
        cluster.prepare = lambda actor, name: None
        cluster.actors[0].die()
        await cluster.joined(1)
    assert cluster.listener.losses == []
    assert cluster.listener.events == [on.ReplicaJoined(1, 5, 0)]


async def test_a_command_to_a_lost_replica_has_no_effect():
    """The coordinator may not have heard of it yet."""
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[0].die()
        await until(lambda: cluster.listener.losses == [0])
        for command in (SUBMIT, DropSequences(((0, 0),)), TakeSequences(((0, 0),))):
            cluster.pool.send(0, command)
        cluster.pool.send(1, SUBMIT)
        await until(lambda: cluster.actors[1].engine.submitted)
    assert (cluster.actors[0].engine.submitted, cluster.actors[1].engine.submitted) == ([], [(0, 0)])


DEATHS: dict[str, Callable[[], Exception]] = {
    "memory monitor": lambda: OutOfMemoryError("1 worker(s) were killed due to the node running low on memory."),
    "node": lambda: NodeDiedError("The node died."),
    "reply lost with its node": lambda: ObjectLostError("00" * 28, b"", ""),
    "reply not fetched": lambda: ObjectFetchTimedOutError("00" * 28, b"", ""),
    "process": ActorDiedError,
    "worker": WorkerCrashedError,
}
FAILURES: dict[str, Callable[[], Exception]] = {
    "damaged weights": lambda: type("WeightsDamaged", (RuntimeError,), {})("checksum of lm_head.weight differs"),
    "engine": lambda: IndexError("list index out of range"),
    "device": lambda: type("AcceleratorError", (RuntimeError,), {})("CUDA error: an illegal memory access"),
    "device memory": lambda: type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"),
    "not a number": lambda: NotFiniteLogProbs("token 3 of sequence (0, 0) has the log-prob nan"),
}


@pytest.mark.parametrize("failure", [*DEATHS, *FAILURES])
async def test_whatever_fails_in_one_replica_is_the_loss_of_that_replica_only(failure):
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        if failure in DEATHS:
            cluster.actors[1].die(DEATHS[failure]())
        else:
            cluster.actors[1].engine.fail(FAILURES[failure]())
        await cluster.joined(3)
        assert cluster.actors[1].killed
        cluster.actors[0].engine.tell(**FINISHED)
        await until(lambda: any(report.finished for _, report in cluster.listener.reports))
    assert cluster.listener.losses == [1]
    assert cluster.names[2] == "rollout-1"


async def test_what_fails_before_a_replica_has_joined_is_its_loss_only():
    """Each time at another step: the process, the engine, the weights."""
    cluster = Cluster(target=2)
    steps = iter(["scheduled", "opening", "loading"])

    def prepare(actor: Actor, name: str) -> None:
        if name == "rollout-1" and (step := next(steps, None)) is not None:
            getattr(actor.worker, step).clear()

    cluster.prepare = prepare
    async with cluster.running():
        for number in (1, 2, 3):
            await until(lambda number=number: number in cluster.actors)
            await settled()
            cluster.actors[number].die(OutOfMemoryError("killed"))
        await cluster.joined(2)
    assert (cluster.listener.losses, cluster.listener.joined) == ([], [0, 4])


@pytest.mark.parametrize("method", ["obey", "exchange"])
async def test_a_replica_whose_calls_hang_is_ended_and_replaced(method):
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        before = now()
        cluster.actors[0].hangs.add(method)
        await asyncio.sleep(1.5)  # the last `exchange` was answered
        cluster.pool.send(0, SUBMIT)
        await cluster.joined(2)
        assert now() - before < ANSWER_SECONDS + MAX_REPORT_SECONDS + 5.0
        assert cluster.actors[0].killed
    assert cluster.listener.losses == [0]


async def test_a_replica_that_does_not_load_a_publication_is_replaced_by_one_that_has():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[0].worker.loading.clear()
        before = now()
        cluster.pool.publish(weights(1))
        await cluster.joined(3)
        assert now() - before == pytest.approx(LIMITS.publish, abs=3.0)
    assert cluster.listener.losses == [0]
    assert cluster.listener.of(on.VersionLoaded) == [on.VersionLoaded(1, 1)]
    assert cluster.listener.of(on.ReplicaJoined)[-1] == on.ReplicaJoined(2, 5, 1)


async def test_a_replica_that_wakes_up_and_does_not_load_its_weights_again_is_replaced():
    """They may be in a folder or an object store that does not answer. It has the newest version, so nothing else would show it."""
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        await cluster.pool.sleep()
        cluster.actors[0].worker.loading.clear()
        woken = now()
        await cluster.pool.wake(reload=True)
        await cluster.joined(2)
    assert LIMITS.publish < now() - woken < LIMITS.publish + MAX_REPORT_SECONDS
    assert cluster.listener.losses == [0]
    assert "did not load its weights again within 30 s" in str(cluster.pool._losses["rollout-0"])


async def test_a_replica_that_loads_its_weights_again_after_it_woke_up_is_not_lost():
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        for _ in range(2):
            await cluster.pool.sleep()
            await cluster.pool.wake(reload=True)
            await asyncio.sleep(2 * LIMITS.publish)
        assert cluster.actors[0].worker.loaded == [0, 0, 0]
    assert cluster.listener.losses == []


@pytest.mark.parametrize(
    ("step", "open_seconds", "limit"),
    [
        ("opening", LIMITS.open, LIMITS.open),
        ("loading", LIMITS.open, LIMITS.publish),
        ("loading", 90.0, 90.0),  # a first load also allocates memory, and registers it with RDMA
    ],
)
async def test_a_replica_that_hangs_before_it_has_joined_is_replaced(step, open_seconds, limit):
    cluster = Cluster(limits=replace(LIMITS, open=open_seconds))
    cluster.prepare = lambda actor, name: getattr(actor.worker, step).clear()
    async with cluster.running():
        await settled()
        cluster.prepare = lambda actor, name: None
        await cluster.joined(1)
        assert limit <= now() <= limit + 3.0
        assert cluster.actors[0].killed
    assert (cluster.listener.losses, cluster.listener.joined) == ([], [1])


# A replica that cannot be reached for a while (A4).


@pytest.mark.parametrize("fault", ["request", "reply"])
async def test_a_replica_that_answers_again_has_lost_nothing(fault):
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        actor = cluster.actors[0]
        actor.faults["obey"] += [fault] * 5
        actor.faults["exchange"] += [fault] * 5
        cluster.pool.send(0, SUBMIT)
        cluster.pool.publish(weights(1))
        actor.engine.tell(**FINISHED)
        await until(lambda: cluster.listener.of(on.VersionLoaded))
        await asyncio.sleep(LIMITS.publish)
    assert actor.engine.submitted == [(0, 0)]
    assert actor.worker.loaded == [0, 1]
    assert cluster.listener.of(on.VersionLoaded) == [on.VersionLoaded(0, 1)]
    assert sum(bool(report.finished) for _, report in cluster.listener.reports) == 1
    assert (cluster.listener.losses, actor.killed) == ([], False)


async def test_a_replica_that_cannot_be_reached_for_long_is_replaced():
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        cluster.actors[0].unreachable = True
        before = now()
        await cluster.joined(2)
        assert UNREACHABLE_SECONDS <= now() - before <= UNREACHABLE_SECONDS + 3.0
        assert cluster.actors[0].killed, "it runs, and would hold the device"


@pytest.mark.parametrize("method", ["address", "open"])
@pytest.mark.parametrize("fault", ["request", "reply", "late"])
async def test_a_replica_that_cannot_be_reached_for_a_while_when_it_starts_is_not_lost(method, fault):
    cluster = Cluster()
    cluster.prepare = lambda actor, name: actor.faults[method].extend([fault] * 5)
    async with cluster.running():
        await cluster.joined(1)
    assert list(cluster.actors) == [0]
    assert cluster.actors[0].counts[method] == 6


@pytest.mark.parametrize("method", ["address", "open"])
async def test_a_replica_that_cannot_be_reached_for_long_when_it_starts_is_replaced(method):
    cluster = Cluster()
    cluster.prepare = lambda actor, name: actor.faults[method].extend(["request"] * 10_000)
    async with cluster.running():
        await settled()
        cluster.prepare = lambda actor, name: None
        await cluster.joined(1)
        assert now() == pytest.approx(LIMITS.open, abs=3.0)
        assert cluster.actors[0].killed
    assert (cluster.listener.losses, cluster.listener.joined) == ([], [1])


# Hangs (A8).


async def test_an_engine_that_hangs_is_ended_and_replaced():
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        engine = cluster.actors[0].engine
        cluster.pool.send(0, SUBMIT)
        await until(lambda: engine.steps >= 5)
        engine.steps_per_report = 0
        before = now()
        await cluster.joined(2)
        assert now() - before == pytest.approx(MAX_STEP_SECONDS, abs=3.0)
    assert cluster.listener.losses == [0]


async def test_an_engine_that_never_makes_its_first_step_is_replaced_after_the_time_to_build_one():
    cluster = Cluster()
    cluster.prepare = lambda actor, name: setattr(actor.engine, "steps_per_report", 0)
    async with cluster.running():
        await cluster.joined(1)
        cluster.pool.send(0, SUBMIT)
        before = now()
        await until(lambda: cluster.listener.losses)
        assert now() - before == pytest.approx(LIMITS.open, abs=3.0)


async def test_a_slow_first_step_is_not_a_hang():
    limits = PoolLimits(slots=5, open=3 * MAX_STEP_SECONDS, publish=30.0, too_few=300.0)
    cluster = Cluster(limits=limits)
    async with cluster.running():
        await cluster.joined(1)
        cluster.actors[0].engine.steps_per_report = 0  # it compiles the model
        cluster.pool.send(0, SUBMIT)
        await asyncio.sleep(2 * MAX_STEP_SECONDS)
        assert cluster.listener.losses == []


async def test_an_engine_without_sequences_makes_no_steps_and_does_not_hang():
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        engine = cluster.actors[0].engine
        cluster.pool.send(0, SUBMIT)
        await until(lambda: engine.steps >= 5)
        engine.busy = False
        await asyncio.sleep(3 * MAX_STEP_SECONDS)
        engine.busy = True  # a new sequence: its time counts from here
        engine.steps_per_report = 0
        await asyncio.sleep(MAX_STEP_SECONDS - 5.0)
        assert cluster.listener.losses == []
        await asyncio.sleep(10.0)
        assert cluster.listener.losses == [0]


async def test_a_long_load_of_weights_is_not_a_hang():
    limits = PoolLimits(slots=5, open=20.0, publish=5 * MAX_STEP_SECONDS, too_few=300.0)
    cluster = Cluster(limits=limits)
    async with cluster.running():
        await cluster.joined(1)
        actor = cluster.actors[0]
        cluster.pool.send(0, SUBMIT)
        await until(lambda: actor.engine.steps >= 5)
        actor.worker.loading.clear()
        actor.engine.steps_per_report = 0  # weights are replaced between two steps
        cluster.pool.publish(weights(1))
        await asyncio.sleep(4 * MAX_STEP_SECONDS)
        actor.worker.loading.set()
        await until(lambda: cluster.listener.of(on.VersionLoaded))
        await asyncio.sleep(MAX_STEP_SECONDS - 5.0)
        assert cluster.listener.losses == []
        await asyncio.sleep(10.0)
        assert cluster.listener.losses == [0], "from now on it hangs"


async def test_an_engine_whose_usual_steps_are_long_hangs_after_many_of_them_also_when_weights_have_arrived():
    step = 2 * MAX_STEP_SECONDS / STEPS_PER_HANG  # seconds
    cluster = Cluster()

    async def work(engine: Any, seconds: float) -> None:
        for _ in range(round(seconds / step)):
            engine.steps += 1
            await asyncio.sleep(step)

    async with cluster.running():
        await cluster.joined(1)
        engine = cluster.actors[0].engine
        cluster.pool.send(0, SUBMIT)
        engine.steps_per_report = 0
        await work(engine, 60.0)
        cluster.pool.publish(weights(1))
        await work(engine, 5.0)
        await asyncio.sleep(1.5 * MAX_STEP_SECONDS)
        assert cluster.listener.losses == []
        await asyncio.sleep(MAX_STEP_SECONDS)
        assert cluster.listener.losses == [0]


# Losses in a row.


async def test_the_more_often_a_replica_is_lost_the_longer_its_next_replacement_waits():
    cluster, lost = Cluster(), list[float]()
    async with cluster.running():
        for number in range(9):
            await cluster.worked(number)
            cluster.actors[number].die()
            lost.append(now())
        await cluster.joined(10)
    delays = [started - before for before, started in zip(lost, cluster.started[1:], strict=True)]
    assert delays[0] < 0.1, "the first replacement comes immediately"
    assert delays[1:7] == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], abs=0.1)
    assert delays[7:] == pytest.approx([MAX_REPLACEMENT_DELAY_SECONDS] * 2, abs=0.1)
    assert cluster.listener.losses == list(range(9))


async def test_losses_of_long_ago_do_not_delay_a_replacement():
    cluster = Cluster()
    async with cluster.running():
        for number in range(4):
            await cluster.worked(number)
            cluster.actors[number].die()
        await cluster.joined(5)
        await asyncio.sleep(LOSS_WINDOW_SECONDS)
        cluster.actors[4].die()
        await cluster.joined(6)
        assert cluster.started[5] - cluster.started[4] < LOSS_WINDOW_SECONDS + 0.2
        assert len(cluster.pool._losses["rollout-0"]) == 1, "earlier ones are forgotten"


async def test_losses_of_a_replica_that_works_in_between_never_end_the_run():
    """A preempted node, again and again."""
    cluster = Cluster(target=2)
    async with cluster.running():
        for count in range(10):
            await cluster.joined(2 + count)
            number = max(number for number, name in cluster.names.items() if name == "rollout-1")
            await cluster.worked(number)
            cluster.actors[number].die()
        await cluster.joined(12)
        assert {cluster.names[number] for number in cluster.listener.losses} == {"rollout-1"}


async def test_all_replicas_may_be_lost_together():
    cluster = Cluster(target=4, minimum=4)
    async with cluster.running():
        await cluster.joined(4)
        for actor in list(cluster.actors.values()):
            actor.die()
        await cluster.joined(8)
        assert sorted(cluster.listener.losses) == [0, 1, 2, 3]
        assert len(cluster.pool) == 4


async def test_all_replicas_may_be_lost_while_a_version_is_copied():
    """Those that come in their place join with the version before, and get the copy when it is published."""
    cluster = Cluster(target=2)
    async with cluster.running(version=3):
        await cluster.joined(2)
        for actor in list(cluster.actors.values()):
            actor.die()
        await cluster.joined(4)
        cluster.pool.publish(weights(4))
        await until(lambda: len(cluster.listener.of(on.VersionLoaded)) == 2)
    assert [event.version for event in cluster.listener.of(on.ReplicaJoined)] == [3, 3, 3, 3]
    assert {event.replica for event in cluster.listener.of(on.VersionLoaded)} == {2, 3}


async def test_a_version_that_is_published_while_there_is_no_replica_is_loaded_before_any_joins():
    cluster = Cluster(target=2)
    async with cluster.running(version=3):
        await cluster.joined(2)
        cluster.prepare = lambda actor, name: actor.worker.opening.clear()
        for actor in list(cluster.actors.values()):
            actor.die()
        await until(lambda: len(cluster.actors) == 4)
        cluster.pool.publish(weights(4))
        for actor in list(cluster.actors.values()):
            actor.worker.opening.set()
        await cluster.joined(4)
    assert [event.version for event in cluster.listener.of(on.ReplicaJoined)] == [3, 3, 4, 4]


# Too few replicas.


async def test_a_replica_whose_pod_never_comes_is_not_lost_and_the_others_continue():
    cluster = Cluster(target=3, minimum=2)
    cluster.prepare = lambda actor, name: name == "rollout-1" and actor.worker.scheduled.clear()
    async with cluster.running():
        await cluster.joined(2)
        await asyncio.sleep(5 * LIMITS.too_few)
        assert not cluster.pool.has_too_few
        pending = next(number for number, name in cluster.names.items() if name == "rollout-1")
        cluster.actors[pending].worker.scheduled.set()
        await cluster.joined(3)
    assert cluster.listener.losses == []
    assert len(cluster.actors) == 3, "it is not started again"


async def test_the_run_ends_when_too_few_replicas_work_for_too_long_with_the_cause_of_each():
    cluster = Cluster(target=5, minimum=3)
    lost: set[str] = set()

    def prepare(actor: Actor, name: str) -> None:
        match name:
            case "rollout-1":
                actor.worker.scheduled.clear()
            case "rollout-2" if name in lost:
                actor.worker.scheduled.clear()
            case "rollout-3":
                actor.worker.opening.clear()
        lost.add(name)

    cluster.prepare = prepare

    async def lose() -> None:
        await cluster.joined(3)
        for number, name in list(cluster.names.items()):
            if name == "rollout-2":
                cluster.actors[number].die(OutOfMemoryError("killed"))

    losing = asyncio.create_task(lose())
    error = await cluster.ended()
    await losing
    assert str(error).startswith(
        f"2 of 5 replicas worked for {LIMITS.too_few:g} s, and the run needs 3 (spec.rollout.minNodes). "
    )
    assert "rollout-1 is pending; " in str(error)
    assert (
        "rollout-2 is pending, lost 1 times, last: rollout-2 was ended during generating, because its machine"
        in str(error)
    )
    assert "rollout-3 " in str(error)
    assert "rollout-3 did not finish loading the model within 20 s" in str(error)
    assert "rollout-0" not in str(error), "it works"
    assert now() == pytest.approx(LIMITS.too_few, abs=5.0)


def start_after(seconds: float) -> Callable[[Actor, str], None]:
    """A preparation of replicas whose engines take this time to build."""

    def prepare(actor: Actor, name: str) -> None:
        actor.worker.scheduled.clear()
        asyncio.get_running_loop().call_later(seconds, actor.worker.scheduled.set)

    return prepare


async def test_the_time_with_too_few_replicas_begins_again_when_enough_work_and_one_finishes_a_sequence():
    """A short time of work suffices, and it does not matter which replica finishes it."""
    cluster = Cluster(target=2, minimum=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.prepare = start_after(0.8 * LIMITS.too_few)
        for round_ in range(4):
            cluster.actors[max(cluster.actors)].die()
            await until(lambda: cluster.pool.has_too_few)
            await cluster.joined(3 + round_)
            cluster.actors[0].engine.tell(**FINISHED)
            await asyncio.sleep(2 * MAX_REPORT_SECONDS)
    assert cluster.listener.losses == [1, 2, 3, 4]


async def test_the_time_with_enough_replicas_is_subtracted_from_the_time_with_too_few():
    """Sequences may be long, or there are none while a batch trains."""
    cluster = Cluster(target=2, minimum=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.prepare = start_after(0.8 * LIMITS.too_few)
        for round_ in range(4):
            cluster.actors[max(cluster.actors)].die()
            await cluster.joined(3 + round_)
            await asyncio.sleep(0.8 * LIMITS.too_few)
    assert cluster.listener.losses == [1, 2, 3, 4]


async def test_replicas_that_are_lost_soon_after_each_start_end_the_run_if_they_finish_nothing():
    """Neither their steps nor a sequence that finishes while there are too few of them let the run continue."""
    cluster = Cluster(target=2, minimum=2)
    start_seconds, work_seconds = 40.0, 10.0

    async def lose() -> None:
        await cluster.joined(2)
        cluster.prepare = start_after(start_seconds)
        for number in range(1, 100):
            await cluster.worked(number)
            await asyncio.sleep(work_seconds)
            cluster.actors[number].die()
            await until(lambda number=number: number in cluster.listener.losses)
            cluster.actors[0].engine.tell(**FINISHED)
            await cluster.joined(number + 2)

    error = await cluster.failure(lose)
    assert "1 of 2 replicas worked for 300 s, and the run needs 2 (spec.rollout.minNodes). rollout-1 " in str(error)
    assert 1.0 < now() / LIMITS.too_few < 2.0


async def test_a_slow_start_does_not_count_when_a_replica_is_lost_after_it():
    cluster = Cluster(target=1)
    cluster.prepare = start_after(0.9 * (LIMITS.open + LIMITS.too_few))
    async with cluster.running():
        await cluster.worked(0)
        cluster.prepare = start_after(0.9 * LIMITS.too_few)
        cluster.actors[0].die()
        await cluster.joined(2)


async def test_the_lane_does_not_count_among_the_replicas_that_a_run_needs():
    cluster = Cluster(target=1, lanes=2)
    cluster.prepare = lambda actor, name: name == "rollout-0" and actor.worker.scheduled.clear()
    error = await cluster.ended()
    assert str(error) == (
        f"0 of 1 replicas worked for {LIMITS.open + LIMITS.too_few:g} s, and the run needs 1 (spec.rollout.minNodes). "
        "rollout-0 is pending"
    )


async def test_a_lane_that_never_starts_ends_the_run_and_names_what_each_of_its_replicas_waits_for():
    cluster = Cluster(target=1, lanes=2)
    cluster.prepare = lambda actor, name: name.startswith("lane") and actor.worker.scheduled.clear()
    error = await cluster.ended()
    assert str(error) == (
        f"no replica of the straggler lane started within {LIMITS.open + LIMITS.too_few:g} s (spec.rollout.stragglerLane). "
        "lane-0 is pending; lane-1 is pending"
    )
    assert now() == pytest.approx(LIMITS.open + LIMITS.too_few)


async def test_a_lane_whose_replicas_are_all_lost_as_they_start_ends_the_run_with_their_causes():
    """Its configuration cannot work: nobody waits for the time limit."""
    cluster = Cluster(target=1, lanes=2)

    def prepare(actor: Actor, name: str) -> None:
        if name.startswith("lane"):
            actor.worker.opening.clear()
            asyncio.get_running_loop().call_later(1.0, actor.die, OutOfMemoryError("killed"))

    cluster.prepare = prepare
    error = await cluster.ended()
    assert str(error).startswith("no replica of the straggler lane has ever started. lane-0 ")
    for name in ("lane-0", "lane-1"):
        assert f"lost {MAX_FAILED_STARTS} times, last: {name} was ended during loading the model" in str(error)
    assert "rollout-0" not in str(error)
    assert reason_of(error) is FailureReason.OUT_OF_MEMORY
    assert now() < 0.1 * LIMITS.too_few


async def test_a_run_continues_without_a_lane_that_has_worked():
    cluster = Cluster(target=1, lanes=1)
    async with cluster.running():
        await cluster.joined(2)
        cluster.prepare = lambda actor, name: name.startswith("lane") and actor.worker.scheduled.clear()
        [lane] = [number for number, name in cluster.names.items() if name == "lane-0"]
        cluster.actors[lane].die()
        await until(lambda: cluster.listener.losses)
        await asyncio.sleep(2 * (LIMITS.open + LIMITS.too_few))
        assert not cluster.pool.has_too_few


async def test_a_run_needs_no_more_replicas_than_its_target():
    cluster = Cluster(target=3, minimum=3)
    async with cluster.running():
        await cluster.joined(3)
        cluster.actors[2].die()
        cluster.pool.resize(2)
        await until(lambda: cluster.listener.losses)
        assert not cluster.pool.has_too_few


async def test_replicas_end_the_run_if_none_has_ever_worked_and_each_was_lost_a_few_times():
    """Its configuration cannot work: nobody waits for the time limit."""
    cluster = Cluster(target=2)

    def prepare(actor: Actor, name: str) -> None:
        actor.worker.opening.clear()
        asyncio.get_running_loop().call_later(1.0, actor.die, OutOfMemoryError("killed"))

    cluster.prepare = prepare
    error = await cluster.ended()
    assert str(error).startswith("no replica has ever worked. rollout-0 ")
    for name in ("rollout-0", "rollout-1"):
        assert f"lost {MAX_FAILED_STARTS} times, last: {name} was ended during loading the model" in str(error)
    assert reason_of(error) is FailureReason.OUT_OF_MEMORY
    assert now() < 0.1 * LIMITS.too_few


async def test_replicas_whose_log_probs_are_never_numbers_end_the_run_with_that_reason():
    """The weights are damaged for all of them. The reason is that of the last loss."""
    cluster = Cluster(target=1)

    def prepare(actor: Actor, name: str) -> None:
        asyncio.get_running_loop().call_later(
            1.0, actor.engine.fail, NotFiniteLogProbs("token 3 of sequence (0, 0) has the log-prob nan")
        )

    cluster.prepare = prepare
    error = await cluster.ended()
    assert "NotFiniteLogProbs: token 3 of sequence (0, 0) has the log-prob nan" in str(error)
    assert reason_of(error) is FailureReason.NOT_FINITE


DIFFERS = LogProbsDiffer("with the weights of version 0, its log-probs differ")


PROBE = Probe((np.array([3, 4, 5], np.int32),), np.zeros(2, np.float32), limit=0.1)


async def test_a_probe_follows_its_version_to_every_replica_also_to_those_that_load_it_and_those_that_come_later():
    cluster = Cluster(target=3, lanes=1)
    cluster.prepare = lambda actor, name: name == "rollout-2" and actor.worker.opening.clear()
    async with cluster.running():
        await cluster.joined(3)
        cluster.actors[0].worker.loading.clear()
        cluster.pool.publish(weights(1))
        await until(lambda: len(cluster.listener.of(on.VersionLoaded)) == 2)
        cluster.pool.probe(0, PROBE)  # its version was replaced meanwhile
        cluster.pool.probe(1, PROBE)
        cluster.actors[0].worker.loading.set()
        cluster.actors[2].worker.opening.set()
        await cluster.joined(4)
        await until(lambda: all(1 in actor.worker.loaded for actor in cluster.actors.values()))
        cluster.pool.publish(weights(2))
        await until(lambda: all(2 in actor.worker.loaded for actor in cluster.actors.values()))
    assert [actor.worker.probed for actor in cluster.actors.values()] == [[1]] * 4


async def test_a_run_ends_when_every_replica_has_failed_a_probe_and_none_has_passed_one_since():
    """The first failed probe may be due to a faulty device, and so may be several of one replica, while another works.

    After the last probe that passed, replicas that replace others are waited for until each has failed, too.
    """
    cluster = Cluster(target=2)

    async def differ() -> None:
        await cluster.joined(2)
        for number in (0, 2):  # rollout-0 and its replacement
            cluster.actors[number].engine.fail(DIFFERS)
            await cluster.joined(max(cluster.names) + 2)
        cluster.actors[1].engine.tell(probed=ProbeResult(0, 0.01, 0.02))
        await until(lambda: any(report.probed for _, report in cluster.listener.reports))
        cluster.actors[1].engine.fail(DIFFERS)
        for number in (3, 4, 5):
            await cluster.joined(number + 2)
            cluster.actors[number].engine.fail(DIFFERS)

    error = await cluster.failure(differ)
    assert [cluster.names[number] for number in range(6)] == [f"rollout-{number}" for number in (0, 1, 0, 0, 1, 0)]
    assert reason_of(error) is FailureReason.LOG_PROBS_DIFFER
    for host in ("pod-4", "pod-5"):
        assert f"{host}: LogProbsDiffer: {DIFFERS}" in str(error)


async def test_failed_probes_of_one_replica_never_end_the_run_while_others_are_pending():
    """Its device may be faulty, and the others cannot show that."""
    cluster = Cluster(target=3)
    cluster.prepare = lambda actor, name: name != "rollout-0" and actor.worker.scheduled.clear()
    async with cluster.running():
        for number in (0, 3, 4):
            await until(lambda number=number: number in cluster.actors)
            await cluster.joined(1)
            cluster.actors[number].engine.fail(DIFFERS)
        await until(lambda: 5 in cluster.actors)
    assert [cluster.names[number] for number in (0, 3, 4, 5)] == ["rollout-0"] * 4


async def test_a_replica_that_runs_without_an_answer_yet_may_still_show_that_the_trainer_is_right():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.actors[0].engine.fail(DIFFERS)
        await cluster.joined(3)
        cluster.actors[1].engine.fail(DIFFERS)
        await cluster.joined(4)
        cluster.actors[2].engine.tell(probed=ProbeResult(0, 0.01, 0.02))
        await until(lambda: any(report.probed for _, report in cluster.listener.reports))


async def test_the_only_replica_is_replaced_once_after_a_failed_probe():
    cluster = Cluster(target=1)

    async def differ() -> None:
        for number in range(2):
            await cluster.joined(number + 1)
            cluster.actors[number].engine.fail(DIFFERS)

    assert reason_of(await cluster.failure(differ)) is FailureReason.LOG_PROBS_DIFFER
    assert len(cluster.names) == 2


async def test_as_long_as_one_replica_may_still_come_losses_of_the_others_do_not_end_the_run():
    cluster = Cluster(target=2)

    def prepare(actor: Actor, name: str) -> None:
        if name == "rollout-1":
            actor.worker.scheduled.clear()
        else:
            asyncio.get_running_loop().call_later(1.0, actor.die)

    cluster.prepare = prepare
    async with cluster.running():
        await until(lambda: len(cluster.names) == 4 + MAX_FAILED_STARTS)
    assert all(number not in cluster.listener.losses for number, name in cluster.names.items() if name == "rollout-1")


async def test_losses_after_a_replica_has_worked_end_the_run_only_by_the_time_limit():
    cluster = Cluster()

    async def lose() -> None:
        await cluster.worked(0)
        cluster.prepare = lambda actor, name: actor.die()
        cluster.actors[0].die()

    losing = asyncio.create_task(lose())
    error = await cluster.ended()
    await losing
    assert len(cluster.pool._losses["rollout-0"]) > MAX_FAILED_STARTS
    assert now() == pytest.approx(LIMITS.too_few, abs=5.0)
    assert "rollout-0 will be started again, lost " in str(error)
    assert reason_of(error) is FailureReason.WORKER_LOST


# A pool that shares its devices with the train pool.


async def test_a_pool_that_stops_starting_ends_replicas_at_every_step_of_their_start_and_replaces_none():
    cluster = Cluster(target=4)
    steps = {"rollout-0": "scheduled", "rollout-1": "opening", "rollout-2": "loading"}
    cluster.prepare = lambda actor, name: name in steps and getattr(actor.worker, steps[name]).clear()
    async with cluster.running():
        await cluster.joined(1)
        await asyncio.sleep(5.0)
        sleeping = asyncio.create_task(cluster.pool.sleep())
        await settled()
        cluster.pool.stop_starting()
        before = now()
        await sleeping
        assert now() - before < 2 * MAX_REPORT_SECONDS
        assert [actor.killed for actor in cluster.actors.values()] == [True, True, True, False]
        await cluster.pool.wake(reload=True)
        await asyncio.sleep(10 * LIMITS.open)
        assert len(cluster.actors) == 4
    assert (cluster.listener.joined, cluster.listener.losses) == ([3], [])


async def test_a_replica_whose_start_is_ended_when_its_weights_have_just_arrived_does_not_join():
    cluster = Cluster()
    cluster.prepare = lambda actor, name: actor.worker.loading.clear()
    async with cluster.running():
        await asyncio.sleep(5.0)
        loaded = cluster.pool._loaded

        async def stop(replica: RolloutReplica, version: int) -> None:
            await loaded(replica, version)
            cluster.pool.stop_starting()

        cluster.pool._loaded = stop
        cluster.pool.publish(weights(1))
        cluster.actors[0].worker.loading.set()
        await asyncio.sleep(LIMITS.publish)
    assert (cluster.listener.joined, cluster.listener.losses) == ([], [])


async def test_time_in_which_the_pool_sleeps_does_not_count_as_time_with_too_few_replicas():
    """Neither before its first turn, nor after a replica was lost that cannot be replaced before the next turn."""
    cluster = Cluster(target=2, minimum=2, takes_turns=True)
    start_seconds = 0.9 * LIMITS.open
    async with cluster.running():
        await asyncio.sleep(2 * (LIMITS.open + LIMITS.too_few))
        await cluster.pool.wake(reload=False)
        await cluster.joined(2)
        await cluster.pool.sleep()
        cluster.actors[1].die()
        await until(lambda: cluster.listener.losses)

        def start_slowly(actor: Actor, name: str) -> None:
            actor.worker.opening.clear()
            asyncio.get_running_loop().call_later(start_seconds, actor.worker.opening.set)

        cluster.prepare = start_slowly
        await asyncio.sleep(LIMITS.too_few - 1.0)
        await cluster.pool.wake(reload=True)
        await cluster.joined(3)
        assert not cluster.pool.has_too_few


async def test_a_turn_of_generation_with_too_few_replicas_ends_the_run_also_when_it_waits_for_one_that_is_pending():
    cluster = Cluster(target=2, minimum=2, takes_turns=True)
    cluster.prepare = lambda actor, name: name == "rollout-1" and actor.worker.scheduled.clear()
    began: list[float] = []

    async def take_turns() -> None:
        await asyncio.sleep(1000.0)
        began.append(now())
        await cluster.pool.wake(reload=False)
        await cluster.joined(1)
        await cluster.pool.sleep()

    error = await cluster.failure(take_turns)
    assert "1 of 2 replicas worked for 320 s, and the run needs 2" in str(error)
    assert now() - began[0] == pytest.approx(LIMITS.open + LIMITS.too_few)


async def test_a_pool_that_sleeps_as_soon_as_it_was_woken_starts_nothing():
    cluster = Cluster()
    async with cluster.running():
        await cluster.joined(1)
        await cluster.pool.sleep()
        cluster.actors[0].die()
        await until(lambda: cluster.listener.losses)
        await cluster.pool.wake(reload=True)
        await cluster.pool.sleep()
        await asyncio.sleep(10.0)
        assert len(cluster.actors) == 1
        await cluster.pool.wake(reload=True)
        await cluster.joined(2)


# The size of the pool.


async def test_the_pool_grows_immediately_and_shrinks_only_when_hosts_are_removed():
    cluster = Cluster(target=1)
    cluster.pool.resize(2)  # before it began
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.resize(3)
        await cluster.joined(3)
        cluster.pool.resize(1)
        await settled()
        assert len(cluster.pool) == 3
        assert not any(actor.killed for actor in cluster.actors.values())
        # Of those too many, the lost are not replaced.
        cluster.actors[0].die()
        cluster.actors[2].die()
        await until(lambda: len(cluster.pool) == 1)
        await asyncio.sleep(10.0)
    cluster.pool.resize(9)  # after it ended
    await settled()
    assert cluster.names == {0: "rollout-0", 1: "rollout-1", 2: "rollout-2"}


async def test_a_smaller_target_ends_pending_replicas_that_are_too_many():
    cluster = Cluster(target=2, lanes=1)
    cluster.prepare = lambda actor, name: name not in ("rollout-0", "rollout-1") and actor.worker.scheduled.clear()
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.resize(5)
        await until(lambda: len(cluster.actors) == 6)
        cluster.pool.resize(3)
        await settled()
        ended = {cluster.names[number] for number, actor in cluster.actors.items() if actor.killed}
        assert ended == {"rollout-3", "rollout-4"}, "and not the lane, nor a replica that works"
        cluster.pool.resize(2)
        await asyncio.sleep(10.0)
        assert sum(actor.killed for actor in cluster.actors.values()) == 3
        cluster.pool.resize(3)
        await until(lambda: len(cluster.actors) == 7)
        cluster.actors[6].worker.scheduled.set()
        await cluster.joined(3)
    assert cluster.names[6] == "rollout-2"
    assert cluster.listener.losses == []


async def test_a_smaller_target_ends_the_wait_for_a_pending_replica_before_the_pool_sleeps():
    cluster = Cluster(target=2)
    cluster.prepare = lambda actor, name: name == "rollout-1" and actor.worker.scheduled.clear()
    async with cluster.running():
        await cluster.joined(1)
        sleeping = asyncio.create_task(cluster.pool.sleep())
        await asyncio.sleep(10.0)
        assert not sleeping.done(), "a pending replica would take the devices"
        cluster.pool.resize(1)
        await asyncio.wait_for(sleeping, LIMITS.publish)
    assert [actor.killed for actor in cluster.actors.values()] == [False, True]


async def test_a_replacement_that_waits_is_not_started_when_the_target_was_lowered():
    cluster = Cluster(target=2)
    async with cluster.running():
        for number in (1, 2, 3):
            await cluster.worked(number)
            cluster.actors[number].die()
        await until(lambda: cluster.listener.losses == [1, 2, 3])
        cluster.pool.resize(1)  # the next one waits for some seconds
        await asyncio.sleep(60.0)
        assert len(cluster.actors) == 4
        cluster.pool.resize(2)
        await cluster.joined(5)


async def test_a_lost_replica_that_a_lower_target_needs_is_started_although_a_higher_one_waits():
    cluster = Cluster(target=3)
    async with cluster.running():
        for number in (2, 3, 4):
            await cluster.worked(number)
            cluster.actors[number].die()
        await until(lambda: cluster.listener.losses == [2, 3, 4])
        cluster.pool.resize(2)  # rollout-2 waits to be started again
        cluster.actors[0].die()
        await until(lambda: len(cluster.pool) == 1)
        await until(lambda: len(cluster.pool) == 2)
    assert cluster.names[max(cluster.names)] == "rollout-0"


# Hosts that leave.


async def test_replicas_on_leaving_hosts_take_no_more_and_take_again_when_these_stay():
    cluster = Cluster(target=3, lanes=1)
    cluster.hosts = {3: "pod-1"}
    async with cluster.running():
        await cluster.joined(4)
        cluster.pool.leave(frozenset({"pod-1"}))
        assert cluster.listener.leaving == {0: False, 1: True, 2: False, 3: True}
        cluster.pool.leave(frozenset())
        assert not any(cluster.listener.leaving.values())


async def test_a_replica_of_several_nodes_leaves_with_any_of_them_and_ends_on_all():
    cluster = Cluster(target=2)
    cluster.further_nodes = 1
    async with cluster.running():
        await cluster.joined(2)
        assert cluster.pool.hosts == {"rollout-0": ("pod-0", "pod-0-1"), "rollout-1": ("pod-1", "pod-1-1")}
        cluster.pool.leave(frozenset({"pod-1-1"}))
        assert cluster.listener.leaving == {0: False, 1: True}
        cluster.actors[1].die()
        await until(lambda: cluster.listener.losses == [1])
        assert cluster.further[1][0].killed
        assert not cluster.further[0][0].killed


async def test_no_replica_leaves_when_all_would():
    cluster = Cluster(target=2, lanes=1)
    async with cluster.running():
        await cluster.joined(3)
        # The lane, which is to stay, takes stragglers only.
        cluster.pool.leave(frozenset({"pod-0", "pod-1", "pod-of-yesterday"}))
        assert not any(cluster.listener.leaving.values())


async def test_those_that_had_to_stay_leave_once_another_has_come():
    cluster = Cluster(target=1)
    async with cluster.running():
        await cluster.joined(1)
        cluster.pool.leave(frozenset({"pod-0"}))
        assert cluster.listener.leaving == {0: False}
        cluster.pool.resize(2)
        await cluster.joined(2)
        assert cluster.listener.leaving == {0: True, 1: False}


async def test_replicas_that_leave_continue_when_the_last_that_stayed_is_lost():
    cluster = Cluster(target=2)
    async with cluster.running():
        await cluster.joined(2)
        cluster.pool.leave(frozenset({"pod-0"}))
        assert cluster.listener.leaving == {0: True, 1: False}
        cluster.prepare = lambda actor, name: actor.worker.loading.clear()
        cluster.actors[1].die()
        await until(lambda: cluster.listener.losses == [1])
        assert cluster.listener.leaving[0] is False
        await until(lambda: 2 in cluster.actors)
        cluster.actors[2].worker.loading.set()
        await cluster.joined(3)
        assert cluster.listener.leaving[0] is True


async def test_a_replica_that_comes_on_a_leaving_host_takes_nothing():
    cluster = Cluster(target=2)
    cluster.pool.leave(frozenset({"pod-1"}))
    async with cluster.running():
        await cluster.joined(2)
        assert cluster.listener.leaving[1] is True


def test_only_the_rays_kill_of_the_tests_is_called():
    assert ray.kill.__module__ == "tests.runtime.replicas"
    assert rollout_pool.ray is ray
