"""The rollout pool: starts replicas, sends them commands, and replaces those that are lost.

    spawn ─► pending ─► opening ─► loading ─► working: commands, reports, … ──► lost ─► fenced ─► spawn another
               │           │          ▲           │                               ▲
               │           └──────────┼───────────┴── any failed call, or no step ┘
               └ no node for it: not a loss
                                 newest weights

waits on                 unblocked by                                deadline
pending: its process     a node with room for it                     none, until there are too few replicas
opening: the engine      the model is built                          PoolLimits.open
an unreachable replica   the network works again: the call repeats   PoolLimits.open at its start, later UNREACHABLE_SECONDS
loading: weights         the worker's report                         PoolLimits.publish
working: a step          the engine's next step                      MAX_STEP_SECONDS, or STEPS_PER_HANG usual steps
sleep, wake              the report of each replica                  PoolLimits.publish, then it is lost
too few replicas         `minimum` replicas work                     PoolLimits.too_few, see `ShortageWatch`; at the start PoolLimits.open longer
the first of the lane    one replica of the lane has joined          PoolLimits.open + PoolLimits.too_few, from the start

A replica is lost when any call to it fails: its process ended or ran out of memory, its node is gone, its engine failed
or hangs, weights arrived damaged, or its log-probs of a probe differ from the trainer's. Its process is then killed,
and another replica gets its name. The start of the other replica is delayed. The delay grows with the number of losses
under this name within LOSS_WINDOW_SECONDS. The loss is reported to the coordinator once. Commands to a lost replica
have no effect, because the coordinator moves its sequences.

The straggler lane consists of replicas with more devices, to which long sequences (stragglers) may move. A run
continues when it loses a lane that has worked: stragglers stay in the pool until the lane is back. A run ends if its
lane never starts, because the lane would occupy nodes without using them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import ray

from qwen35_trainer.contract.retry import backoff_seconds
from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.runtime.calls import ActorLost, ActorUnreachable, answer
from qwen35_trainer.runtime.replica_channel import (
    EngineReport,
    LoadWeights,
    ProbeWeights,
    ReplicaChannel,
    ReplicaCommand,
    ReplicaFailed,
    SleepEngine,
    WakeEngine,
)
from qwen35_trainer.runtime.replica_node import NodeActors
from qwen35_trainer.runtime.weight_distribution import WeightDistribution
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.probe import LogProbsDiffer, Probe
from qwen35_trainer.weights.published import PublishedWeights

logger = logging.getLogger(__name__)

LOSS_WINDOW_SECONDS = 600.0
"""Time for which the loss of a replica counts. Losses within this time delay the next replica of the same name."""
MAX_REPLACEMENT_DELAY_SECONDS = 60.0
MAX_FAILED_STARTS = 3
"""Number of losses of each replica, within LOSS_WINDOW_SECONDS, after which a run ends that has never made a step.

The configuration of such a run cannot work.
"""
MAX_STEP_SECONDS = 120.0
"""Time without a step after which a replica that has sequences counts as hanging, unless its usual steps are long."""
MIN_FAILED_PROBES = 2
"""Number of failed probes before the trainer's log-probs, rather than those of one replica, count as wrong.

They must be those of different replicas, unless there is only one. A replica that replaces another one has the same name, and
may have the same faulty device.
"""
STEPS_PER_HANG = 100.0
"""Number of mean step durations without a step after which a replica with long steps counts as hanging."""
_REPEAT_SECONDS = 0.5

LANE_PREFIX, POOL_PREFIX = "lane-", "rollout-"


def replica_names(count: int, *, lane: bool = False) -> list[str]:
    """Return the names of the first `count` replicas of the rollout pool.

    lane: whether to name the replicas of the straggler lane instead, to which long sequences may move.
    """
    return [f"{LANE_PREFIX if lane else POOL_PREFIX}{index}" for index in range(count)]


class TooFewReplicas(ActorLost):
    """Too few replicas worked for too long, or no replica of the pool or of the straggler lane could start.

    The message names the cause for each missing replica.
    """


class PoolListener(Protocol):
    """Receives the events of the rollout pool, the reports of its replicas, and the loss of each replica."""

    def tell(self, event: on.Event) -> None: ...

    def reported(self, replica: RolloutReplica, report: EngineReport) -> None: ...

    def lost(self, replica: RolloutReplica) -> None: ...


@dataclass(eq=False)
class RolloutReplica:
    """One replica of the rollout pool, and its actor. number: identifies the replica for the coordinator.

    If the replica is lost, its replacement has the same name and another number.
    """

    number: int
    name: str
    actor: Any
    lane: bool = False
    nodes: NodeActors | None = None
    """The actors of its further nodes; None if it is not larger than a node."""
    hosts: tuple[str, ...] = ()
    """The host of each of its nodes. Empty until all of its processes have started."""
    token_room: int | None = None
    """Number of tokens that the replica's memory holds. None: its number of slots is the stricter limit."""
    version: int = -1
    sent: frozenset[int] = frozenset()
    """Versions of the weights that the replica has, or that were sent to it and that it may still fetch."""
    awake: bool = True
    """Whether the replica has the memory of its devices."""
    turning_since: float | None = None
    """When the command to sleep or wake up was sent, or when the replica began to load its version again after it woke up.

    On the event loop's clock; None: all of that is done.
    """
    reloads: bool = False
    """Whether the replica loads its version again once it is awake, or does so now."""
    slept: MemoryChange | None = None
    """The memory that the replica gave back when it last fell asleep; None: it never did."""
    state: str = "is pending"
    """What the replica is doing, as text for messages."""
    channel: ReplicaChannel = field(init=False)
    address: Any = field(init=False)
    """The call that is answered when the actor's process has started."""
    opened: Any = field(init=False)
    """The call that is answered when the replica's engine is built."""

    def __post_init__(self) -> None:
        self.channel = ReplicaChannel(self.actor, self.name)
        # Called here, so that processes and engines start while other parts of the run do.
        self.address, self.opened = self.actor.address.remote(), self.actor.open.remote()

    def end(self) -> None:
        """Kill its processes on all nodes."""
        ray.kill(self.actor)
        if self.nodes is not None:
            self.nodes.end()

    def send_weights(self, weights: PublishedWeights) -> None:
        """Send a version of the weights, which the replica then fetches and uses."""
        new = weights.manifest.version
        self.sent = frozenset({*(version for version in self.sent if version >= self.version), new})
        self.channel.send(LoadWeights(weights))


@dataclass(frozen=True)
class PoolLimits:
    """The limits of the rollout pool.

    slots: number of sequences per replica. All other limits are maximum times in seconds. open: time to build an
    engine. publish: time to load a version of the weights. too_few: time for which the run continues with too few
    replicas, as `ShortageWatch` measures it.
    """

    slots: int
    open: float
    publish: float
    too_few: float


class StepWatch:
    """The watchdog of a replica. Detects that the engine hangs: it has sequences, but makes no further step."""

    def __init__(self, now: float, first_step: float) -> None:
        """Begin to watch at time `now`, in seconds.

        first_step: maximum seconds until the first step is done. The first step may take long because it may
        compile the model.
        """
        self._first_step = first_step
        self._since, self._steps = now, 0
        self._mean = 0.0

    def observe(self, report: EngineReport, now: float) -> None:
        """Record a report of the replica at time `now`, in seconds. Raises ReplicaFailed if the engine hangs."""
        if report.steps > self._steps or not report.busy:
            if report.steps > self._steps:
                duration = (now - self._since) / (report.steps - self._steps)
                self._mean = 0.9 * self._mean + 0.1 * duration if self._mean else duration
            self.pause(report, now)
            return
        limit = max(MAX_STEP_SECONDS, STEPS_PER_HANG * self._mean) if self._steps else self._first_step
        if now - self._since > limit:
            raise ReplicaFailed(f"its engine has sequences and made no step for {now - self._since:.0f} s")

    def pause(self, report: EngineReport, now: float) -> None:
        """Record a report of an engine that need not make steps now, so that it does not count as hanging."""
        self._since, self._steps = now, report.steps


type PoolState = Literal["has too few", "has enough", "sleeps"]
"""Whether fewer replicas work than the run needs. It sleeps: no replica starts or may start, because others have the devices."""


class ShortageWatch:
    """Measures for how long a pool has had too few replicas.

    The time with enough replicas is subtracted. It does not set the measured time to 0: otherwise replicas that work for
    ten seconds after each start, and finish nothing, would keep a run alive for hours. A sequence that finishes while
    there are enough replicas does set it to 0, so that a run whose replicas do work does not end, however often they are
    lost. The start has a limit of its own, and is not part of the time that is measured later.

    The time in which the pool sleeps does not count, because no replica can take the place of a lost one. The turn of
    training may take as long as the limit.
    """

    def __init__(self, first: float, limit: float) -> None:
        """Begin to watch a pool that sleeps. limit: maximum seconds with too few replicas. first: those at the start."""
        self.limit, self._later = first, limit
        self._counted = 0.0
        self._state: PoolState = "sleeps"
        self._since = 0.0

    def observe(self, state: PoolState, now: float) -> None:
        """Record the state that the pool has from time `now`, in seconds, until the next call."""
        if self._state == "has too few":
            self._counted += now - self._since
        elif self._state == "has enough":
            self._counted = max(0.0, self._counted - (now - self._since))
        if state == "has enough" and self.limit != self._later:
            self.limit, self._counted = self._later, 0.0  # the start is over
        self._state, self._since = state, now

    def finished(self) -> None:
        """Record that a replica has finished a sequence."""
        if self._state == "has enough":
            self._counted = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run has to end if the state stays. None: it does not have to end."""
        return self.limit - self._counted if self._state == "has too few" else None


class RolloutPool:
    """Keeps `target` replicas running, and `lanes` replicas in the straggler lane, to which long sequences may move.

    spawn: starts a replica with (number, name, lane). listener: gets the events and reports of the replicas. minimum:
    number of replicas, without those of the lane, that the run needs to continue. replica_ranks: number of devices of
    one replica. takes_turns: whether the pool shares its devices with the train pool (`device_turns.py`). If so, no
    replica starts before the first `wake`, or while the pool sleeps.
    """

    def __init__(
        self,
        spawn: Callable[[int, str, bool], RolloutReplica],
        listener: PoolListener,
        limits: PoolLimits,
        *,
        target: int,
        minimum: int,
        lanes: int = 0,
        replica_ranks: int = 1,
        takes_turns: bool = False,
    ) -> None:
        self._spawn, self._listener, self._limits = spawn, listener, limits
        self._target, self._minimum, self._lanes = target, minimum, lanes
        self._replicas: dict[int, RolloutReplica] = {}  # by number; joined
        self._starting: dict[str, RolloutReplica] = {}  # by name; not joined yet
        self._awaited: set[str] = set()  # names whose next replica starts after a delay
        self._next = 0
        self._distribution = WeightDistribution(replica_ranks)
        self._leaving: frozenset[str] = frozenset()
        self._losses: defaultdict[str, deque[tuple[float, str]]] = defaultdict(deque)  # by name: time, cause
        self._worked = False  # whether any replica has ever made a step
        self._lane_joined = asyncio.Event()  # set when the first replica of the lane joins
        self._last_reason = FailureReason.WORKER_LOST  # of the last loss
        # Since the last probe that a replica passed:
        self._differing: dict[str, str] = {}  # name of each replica that was lost by a probe → cause
        self._failed_probes = 0
        self._shortage = ShortageWatch(limits.open + limits.too_few, limits.too_few)
        self._changed, self._recounted = asyncio.Event(), asyncio.Event()  # both set by `_recount`, each for one task
        self._tasks: asyncio.TaskGroup | None = None
        self._may_start = asyncio.Event()  # cleared while the pool sleeps, and by `stop_starting`
        self._stops_starting = False
        if not takes_turns:
            self._may_start.set()
        self._turned = asyncio.Event()  # set when a replica has joined or ended, fell asleep or woke up

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def hosts(self) -> dict[str, tuple[str, ...]]:
        """Name of a replica that has joined → hosts where it runs. In a cluster, a host is a pod."""
        return {replica.name: replica.hosts for replica in self._replicas.values()}

    @property
    def names(self) -> dict[int, str]:
        """Number of a replica → its name, for all replicas that have joined."""
        return {number: replica.name for number, replica in self._replicas.items()}

    @property
    def versions_in_use(self) -> frozenset[int]:
        """The versions of the weights that replicas have or may still fetch. Versions of lost replicas do not count."""
        replicas = (*self._replicas.values(), *self._starting.values())
        newest = set[int]() if self._newest is None else {self._newest.manifest.version}
        return frozenset(newest | {each for replica in replicas for each in replica.sent if each >= replica.version})

    @property
    def _newest(self) -> PublishedWeights | None:
        return self._distribution.newest

    @property
    def has_too_few(self) -> bool:
        """Whether fewer replicas work than the run needs. `ShortageWatch` decides how long that may last."""
        return self._working < min(self._minimum, self._target)

    @property
    def _state(self) -> PoolState:
        if not (self._may_start.is_set() or self._starting):
            return "sleeps"
        return "has too few" if self.has_too_few else "has enough"

    @property
    def _working(self) -> int:
        return sum(not replica.lane for replica in self._replicas.values())

    def run(self, tasks: asyncio.TaskGroup, weights: PublishedWeights, first: Iterable[RolloutReplica]) -> None:
        """Begin to run the pool, with all its tasks in `tasks`.

        weights: the first version. first: replicas whose actors have started.
        """
        self._tasks = tasks
        self._distribution.publish(weights, ())
        for replica in first:
            self._next = max(self._next, replica.number + 1)
            self._starting[replica.name] = replica
            tasks.create_task(self._live(replica))
        self._fill()
        self._recount()
        tasks.create_task(self._refill())
        tasks.create_task(self._end_with_too_few())
        if self._lanes:
            tasks.create_task(self._end_without_lane())

    def resize(self, target: int) -> None:
        """Set the number of replicas to keep running.

        If the pool has more replicas than `target`, it ends excess replicas whose processes have not started yet. All
        other excess replicas stay until their hosts are removed.
        """
        self._target = target
        self._recount()

    def leave(self, hosts: frozenset[str]) -> None:
        """Send no new sequences to replicas on `hosts`, as long as there is a replica on other hosts.

        For this condition, replicas of the straggler lane (replicas for long sequences) do not count. Each call replaces
        the previous set of hosts. Replicas on hosts that are no longer in the set take sequences again.
        """
        self._leaving = hosts
        leaving = {number for number, replica in self._replicas.items() if not hosts.isdisjoint(replica.hosts)}
        staying = [each for number, each in self._replicas.items() if not each.lane and number not in leaving]
        for replica in self._replicas.values():
            self._listener.tell(on.ReplicaLeaving(replica.number, bool(staying) and replica.number in leaving))

    def send(self, number: int, command: ReplicaCommand) -> bool:
        """Send a command to a replica. If the replica is lost, do nothing and return False.

        The coordinator receives the loss as an event, and then moves the replica's sequences.
        """
        replica = self._replicas.get(number)
        if replica is None:
            return False
        replica.channel.send(command)
        return True

    def publish(self, weights: PublishedWeights) -> None:
        """Send new weights to all replicas, while the replicas continue to generate.

        `WeightDistribution` decides when each replica gets the weights. The listener gets an event for each replica
        that has loaded them.
        """
        self._distribution.publish(weights, self._replicas.values())

    def probe(self, version: int, probe: Probe) -> None:
        """Let all replicas compare their log-probs of `version` with the trainer's, as soon as they have the version.

        Does nothing if a later version was published.
        """
        if self._newest is None or self._newest.manifest.version != version:
            return
        self._distribution.newest = dataclasses.replace(self._newest, probe=probe)
        for replica in (*self._replicas.values(), *self._starting.values()):
            if version in replica.sent:  # all others get the probe with the version
                replica.channel.send(ProbeWeights(version, probe))

    async def sleep(self) -> MemoryChange:
        """Let all replicas release the memory of their devices, and wait until they have released it.

        Returns the device memory that all replicas together used before and after they fell asleep. Replicas that are
        still starting use the devices too. This method therefore waits first until each of them has joined or has ended.
        Lost replicas are replaced after the next `wake`.
        """
        self._may_start.clear()
        self._recount()
        await self._until(lambda: not self._starting)
        self._turn(SleepEngine())
        await self._until(lambda: not any(replica.awake for replica in self._replicas.values()))
        return MemoryChange.total(replica.slept for replica in self._replicas.values() if replica.slept is not None)

    async def wake(self, *, reload: bool) -> None:
        """Let all replicas take their device memory again, and start missing replicas, unless `stop_starting` was called.

        reload: whether the replicas load the version of the weights that they had before; otherwise the caller must
        publish the next version. Returns when all joined replicas are awake.
        """
        if not self._stops_starting:
            self._may_start.set()
        self._recount()
        self._turn(WakeEngine(reload))
        await self._until(lambda: all(replica.awake for replica in self._replicas.values()))

    def stop_starting(self) -> None:
        """End all replicas that have not joined yet, and start no others from now on, because the run stops.

        `sleep` then does not wait for replicas that are starting, and neither does the last checkpoint.
        """
        self._stops_starting = True
        self._may_start.clear()
        self._recount()
        for replica in list(self._starting.values()):
            self._end_starting(replica)

    def _turn(self, command: SleepEngine | WakeEngine) -> None:
        for replica in self._replicas.values():
            if replica.awake == isinstance(command, SleepEngine):
                replica.turning_since = asyncio.get_running_loop().time()
                replica.reloads = isinstance(command, WakeEngine) and command.reload
                replica.channel.send(command)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, a statement about the replicas, holds.

        The wait ends, because each replica has a deadline, after which it counts as lost.
        """
        while not condition():
            self._turned.clear()
            await self._turned.wait()

    def _note_turn(self, replica: RolloutReplica, report: EngineReport, now: float) -> None:
        """Record whether a replica fell asleep, woke up, or has loaded its version again after that.

        Raises ReplicaFailed if one of these takes longer than PoolLimits.publish seconds.
        """
        if report.slept is not None or report.woken:
            replica.awake, replica.turning_since = report.woken, now if replica.reloads else None
            replica.slept = report.slept or replica.slept
            self._turned.set()
        if replica.awake and replica.reloads and report.loaded is not None:
            replica.reloads, replica.turning_since = False, None
        if replica.turning_since is not None and now - replica.turning_since > self._limits.publish:
            if not replica.awake:
                act = "take its memory again"
            else:
                act = "load its weights again" if replica.reloads else "give its memory back"
            raise ReplicaFailed(
                f"{replica.name} did not {act} within {self._limits.publish:g} s (spec.publication.timeoutSeconds)"
            )

    async def _refill(self) -> None:
        """After each change of the pool, start missing replicas and end excess pending ones. Runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._end_excess()
            self._fill()

    def _fill(self) -> None:
        """Start the replicas that are missing from the pool and from the straggler lane."""
        assert self._tasks is not None
        for lane in (False, True):
            for name in self._missing(lane=lane):
                self._awaited.add(name)
                self._tasks.create_task(self._start(name, lane))

    def _missing(self, *, lane: bool) -> list[str]:
        """Return the names of the replicas to start, so that the pool (or the lane, if `lane`) reaches its target."""
        present = {replica.name for replica in self._replicas.values()} | self._starting.keys() | self._awaited
        target = self._lanes if lane else self._target
        missing = target - sum(name.startswith(LANE_PREFIX) == lane for name in present)
        names = [name for name in replica_names(target, lane=lane) if name not in present]
        return names[: max(0, missing)]

    def _end_excess(self) -> None:
        """If there are more replicas than the target, end pending ones, because no nodes will be added for them."""
        pending = [r for r in self._starting.values() if not r.lane and r.state == "is pending"]
        present = [r for r in (*self._replicas.values(), *self._starting.values()) if not r.lane]
        for replica in sorted(pending, key=lambda r: r.number, reverse=True)[: max(0, len(present) - self._target)]:
            self._end_starting(replica)

    def _end_starting(self, replica: RolloutReplica) -> None:
        """End a replica that has not joined yet. It does not count as lost."""
        del self._starting[replica.name]
        self._distribution.lost(replica)
        replica.end()
        self._turned.set()
        self._recount()

    async def _start(self, name: str, lane: bool) -> None:
        """Start the replica called `name`, after a delay that grows with the recent losses of that name.

        lane: whether the replica belongs to the straggler lane.
        """
        now = asyncio.get_running_loop().time()
        losses = self._losses[name]
        while losses and losses[0][0] < now - LOSS_WINDOW_SECONDS:
            losses.popleft()
        if len(losses) > 1:
            await asyncio.sleep(backoff_seconds(len(losses) - 1, first=1.0, maximum=MAX_REPLACEMENT_DELAY_SECONDS))
        while not self._may_start.is_set():  # it may be cleared before this task continues
            await self._may_start.wait()
        self._awaited.discard(name)
        if name not in self._missing(lane=lane):
            self._changed.set()  # the target was lowered: another name may be missing from it
            return
        number, self._next = self._next, self._next + 1
        self._starting[name] = self._spawn(number, name, lane)
        await self._live(self._starting[name])

    async def _live(self, replica: RolloutReplica) -> None:
        """Let a replica join, and pass on its reports until it is lost. A lost replica is replaced.

        A replica that `_end_starting` has ended does not join, and is not replaced.
        """
        try:
            await self._open(replica)
            await self._load_newest(replica)
            if self._starting.get(replica.name) is replica:
                self._join(replica)
                await self._work(replica)
        except ReplicaFailed as error:
            if replica.number in self._replicas or self._starting.get(replica.name) is replica:
                self._lose(replica, error)
        finally:
            replica.channel.close()

    async def _open(self, replica: RolloutReplica) -> None:
        """Wait until the replica's process has started, without a deadline, and then until its engine is built."""
        address = await self._answered(replica, "address", replica.address, "starting its process", None)
        replica.hosts = (address.host, *address.further_hosts)
        replica.state = f"loads the model on {', '.join(replica.hosts)}"
        await replica.channel.connect(address.endpoint)
        replica.token_room = await self._answered(
            replica, "open", replica.opened, "loading the model", self._limits.open
        )

    async def _answered(self, replica: RolloutReplica, method: str, call: Any, act: str, seconds: float | None) -> Any:  # noqa: ANN401  # Ray's, untyped
        """Await the result of `call`, a call of `method` of a replica that is starting.

        If the replica cannot be reached, the call is repeated for up to PoolLimits.open seconds. With a deadline
        (`seconds`), this time counts from the first call. Without one, the process may be pending for long, so the time
        counts from the first failure to reach it. Raises ReplicaFailed after this time, and at any other failure.
        """
        loop = asyncio.get_running_loop()
        give_up = None if seconds is None else loop.time() + self._limits.open
        while True:
            try:
                return await answer(call, of=replica.name, act=act, seconds=seconds)
            except ActorUnreachable as error:
                give_up = give_up or loop.time() + self._limits.open
                if loop.time() >= give_up:
                    raise ReplicaFailed(str(error)) from error
                await asyncio.sleep(_REPEAT_SECONDS)
                call = getattr(replica.actor, method).remote()
            except Exception as error:
                raise ReplicaFailed(str(error) or type(error).__name__) from error

    async def _load_newest(self, replica: RolloutReplica) -> None:
        """Let a replica load the newest version of the weights.

        Repeats this if a newer version was published meanwhile.
        """
        assert self._newest is not None
        replica.state = f"loads weights on {', '.join(replica.hosts)}"
        while replica.version < (newest := self._newest).manifest.version:
            self._distribution.send(replica)
            await self._loaded(replica, newest.manifest.version)

    async def _loaded(self, replica: RolloutReplica, version: int) -> None:
        """Wait until a replica that is starting has loaded `version`.

        Raises ReplicaFailed if that takes longer than PoolLimits.publish seconds, or PoolLimits.open if that is longer:
        the first load includes that the replica allocates its memory and, with RDMA, registers it.
        """
        seconds = max(self._limits.publish, self._limits.open)
        try:
            async with asyncio.timeout(seconds):
                while replica.version < version:
                    for report in await replica.channel.receive():
                        self._distribution.reported(replica, report)
                        self._note_probe(report)
                        replica.version = max(replica.version, -1 if report.loaded is None else report.loaded)
        except TimeoutError as error:
            raise ReplicaFailed(_late(replica, version, seconds)) from error

    def _join(self, replica: RolloutReplica) -> None:
        replica.state = f"works on {', '.join(replica.hosts)}"
        del self._starting[replica.name]
        self._replicas[replica.number] = replica
        if replica.lane:
            self._lane_joined.set()
        self._recount()
        self._turned.set()
        slots, room = self._limits.slots, replica.token_room
        self._listener.tell(on.ReplicaJoined(replica.number, slots, replica.version, replica.lane, room))
        if self._leaving:
            self.leave(self._leaving)

    async def _work(self, replica: RolloutReplica) -> None:
        """Pass on the reports of a replica until it is lost. Raises ReplicaFailed when the replica is lost or hangs."""
        now = asyncio.get_running_loop().time
        watch = StepWatch(now(), self._limits.open)
        behind_since: float | None = None
        while True:
            for report in await replica.channel.receive():
                self._worked |= report.steps > 0
                if report.finished:
                    self._shortage.finished()
                self._distribution.reported(replica, report)
                self._note_probe(report)
                self._note_turn(replica, report, now())
                if report.loaded is not None and report.loaded > replica.version:
                    replica.version, behind_since = report.loaded, None
                    self._listener.tell(on.VersionLoaded(replica.number, replica.version))
                self._listener.reported(replica, report)
                assert self._newest is not None
                newest = self._newest.manifest.version
                if replica.version < newest:  # steps may pause while weights are replaced
                    behind_since = behind_since or now()
                    if now() - behind_since > self._limits.publish:
                        raise ReplicaFailed(_late(replica, newest, self._limits.publish))
                    watch.pause(report, now())
                elif replica.turning_since is not None:
                    watch.pause(report, now())
                else:
                    behind_since = None
                    watch.observe(report, now())

    def _lose(self, replica: RolloutReplica, error: ReplicaFailed) -> None:
        """Kill the process of a lost replica, report the loss, and start another replica.

        Raises TooFewReplicas if no replica has ever worked, or no replica of the lane has ever started, and each one
        was lost MAX_FAILED_STARTS times. Raises LogProbsDiffer if all replicas fail their probes.
        """
        replica.end()  # it may run, and hold the devices that its replacement needs
        self._losses[replica.name].append((asyncio.get_running_loop().time(), str(error)))
        self._last_reason = reason_of(error.__cause__ or error)
        if differs := self._last_reason is FailureReason.LOG_PROBS_DIFFER:
            self._differing[replica.name] = str(error)
            self._failed_probes += 1
        if self._last_reason in (FailureReason.UNEXPECTED_ERROR, FailureReason.LOG_PROBS_DIFFER):
            self._last_reason = FailureReason.WORKER_LOST
        self._starting.pop(replica.name, None)
        self._distribution.lost(replica)
        had_joined = self._replicas.pop(replica.number, None) is not None
        self._turned.set()
        if differs:
            self._raise_if_all_differ()
        self._raise_if_none_can_work()
        cause = str(error) if str(error).startswith(replica.name) else f"{replica.name} was lost: {error}"
        logger.warning("%s; other replicas take over its sequences", cause)
        if had_joined:
            self._listener.lost(replica)
            if self._leaving:
                self.leave(self._leaving)
        self._recount()

    def _note_probe(self, report: EngineReport) -> None:
        """Record that a replica has passed a probe, so that the trainer's log-probs do not count as the wrong ones."""
        if report.probed is not None:
            self._differing.clear()
            self._failed_probes = 0

    def _raise_if_all_differ(self) -> None:
        """Raise LogProbsDiffer if replicas of different names failed their probes, and no replica has passed one since.

        While running replicas may still pass, nothing is raised, until the pool and the lane have had MIN_FAILED_PROBES
        failed probes for each replica.
        """
        total = self._target + self._lanes
        if self._failed_probes < MIN_FAILED_PROBES or len(self._differing) < min(MIN_FAILED_PROBES, total):
            return
        starting = [replica for replica in self._starting.values() if replica.hosts]
        may_pass = self._replicas or any(replica.name not in self._differing for replica in starting)
        if not may_pass or self._failed_probes >= MIN_FAILED_PROBES * total:
            causes = "; ".join(cause for _, cause in sorted(self._differing.items()))
            raise LogProbsDiffer(f"no replica computes the trainer's log-probs. {causes}")

    def _raise_if_none_can_work(self) -> None:
        if not self._worked and self._never_starts(replica_names(self._target)):
            raise self._too_few("no replica has ever worked")
        lane = replica_names(self._lanes, lane=True)
        if lane and not self._lane_joined.is_set() and self._never_starts(lane):
            raise self._too_few("no replica of the straggler lane has ever started", lane=True)

    def _never_starts(self, names: Iterable[str]) -> bool:
        return all(len(self._losses[name]) >= MAX_FAILED_STARTS for name in names)

    async def _end_without_lane(self) -> None:
        """Wait until a replica of the straggler lane has joined for the first time. Raises TooFewReplicas after the deadline."""
        seconds = self._limits.open + self._limits.too_few
        try:
            async with asyncio.timeout(seconds):
                await self._lane_joined.wait()
        except TimeoutError as error:
            raise self._too_few(
                f"no replica of the straggler lane started within {seconds:g} s (spec.rollout.stragglerLane)", lane=True
            ) from error

    async def _end_with_too_few(self) -> None:
        """Wait until there have been too few replicas for too long, and then raise TooFewReplicas."""
        now = asyncio.get_running_loop().time
        while True:
            self._shortage.observe(self._state, now())
            self._recounted.clear()
            try:
                async with asyncio.timeout(self._shortage.seconds_left):
                    await self._recounted.wait()
            except TimeoutError as error:
                raise self._too_few(
                    f"{self._working} of {self._target} replicas worked for {self._shortage.limit:g} s, and the run needs "
                    f"{min(self._minimum, self._target)} (spec.rollout.minNodes)"
                ) from error

    def _recount(self) -> None:
        """Wake the pool's tasks that depend on the number of replicas.

        Must be called after a change of the target, of the replicas that work or start, or of whether they may start.
        """
        self._changed.set()
        self._recounted.set()

    def _too_few(self, summary: str, *, lane: bool = False) -> TooFewReplicas:
        """Return a TooFewReplicas error with the causes of the missing replicas.

        lane: whether they are the replicas of the straggler lane, instead of those of the pool.
        """
        error = TooFewReplicas(
            f"{summary}. {self._causes(replica_names(self._lanes if lane else self._target, lane=lane))}"
        )
        error.failure = self._last_reason
        return error

    def _causes(self, names: Iterable[str]) -> str:
        """Return a text that names the state and the last loss of each replica in `names` that does not work."""
        working = {replica.name for replica in self._replicas.values()}
        lines = []
        for name in names:
            if name in working:
                continue
            state = self._starting[name].state if name in self._starting else "will be started again"
            losses = self._losses[name]
            lines.append(f"{name} {state}" + (f", lost {len(losses)} times, last: {losses[-1][1]}" if losses else ""))
        return "; ".join(lines)


def _late(replica: RolloutReplica, version: int, seconds: float) -> str:
    return f"{replica.name} did not load version {version} within {seconds:g} s (spec.publication.timeoutSeconds)"
