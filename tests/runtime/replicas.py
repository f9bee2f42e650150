"""Rollout replicas for tests on a virtual clock: the worker's real end of the channel, and an engine that the test plays.

    RolloutPool ─► Actor: a call is lost, late, slow, or hangs ─► Worker: CommandOrder, ReportLog ─► Engine: the test, or Writer

All calls are answered immediately unless a test says otherwise, so that only waits for time remain.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import EndReason, GeneratedTokens, SequenceRequest
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.replica_channel import (
    CommandOrder,
    EngineReport,
    LoadWeights,
    ProbeWeights,
    ReplicaCommand,
    ReportLog,
    SleepEngine,
    WakeEngine,
)
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from qwen35_trainer.runtime.rollout_worker import RolloutWorker, WorkerAddress
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.published import PublishedWeights, StoredBuckets
from qwen35_trainer.weights.weight_manifest import WeightLayout, WeightManifest
from tests.operator.kube import virtual

VIRTUAL_PATIENCE = 2000.0
"""Seconds, which are virtual, until what is expected must have happened."""
LATE_SECONDS = 2.0
"""After this time a late call is carried out, and a slow one answered."""


class VirtualTime(asyncio.DefaultEventLoopPolicy):
    """For the fixture `event_loop_policy`: tests run on a clock that jumps."""

    _loop_factory = virtual.Loop


class Engine:
    """What the worker's end of the channel needs of an engine's thread. Its reports are those that the test writes."""

    gather_seconds, report_seconds = 0.02, 1.0

    def __init__(self, on_report: Callable[[], object]) -> None:
        self._on_report = on_report
        self._next: dict[str, Any] = {}
        self.failure: Exception | None = None
        self.submitted: list[SequenceId] = []
        self.dropped: list[SequenceId] = []
        self.asked_back: list[SequenceId] = []
        self.steps, self.busy = 0, False
        self.steps_per_report = 20
        """How many steps it makes from one report to the next while it has sequences."""

    def tell(self, **fields: Any) -> None:
        """Write fields of the next report, and wake up who waits for it."""
        self._next |= fields
        self._on_report()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self._on_report()

    @property
    def has_urgent_report(self) -> bool:
        return bool(self._next.keys() & {"loaded", "taken", "slept", "woken"}) or self.failure is not None

    def report(self, number: int) -> EngineReport:
        fields, self._next = self._next, {}
        self.steps += self.steps_per_report if self.busy else 0
        return EngineReport(number, **{"steps": self.steps, "busy": self.busy} | fields)

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        self.submitted += [request.sequence for request in requests]
        self.busy = True

    def drop(self, sequences: tuple[SequenceId, ...]) -> None:
        self.dropped += sequences

    def take(self, sequences: tuple[SequenceId, ...]) -> None:
        self.asked_back += sequences

    def sleep(self) -> None:
        self.tell(slept=MemoryChange(8, 0))

    def wake(self) -> None:
        self.tell(woken=True)


class Writer(Engine):
    """An engine that writes every response in `seconds`, and reports it. Subclasses change that."""

    seconds, tokens = 2.0, 3

    def __init__(self, on_report: Callable[[], object]) -> None:
        super().__init__(on_report)
        self.version = -1
        self._running: dict[SequenceId, tuple[SequenceRequest, asyncio.TimerHandle]] = {}

    def duration(self, request: SequenceRequest) -> float:
        """Return the seconds that a response takes."""
        return self.seconds

    def tell(self, **fields: Any) -> None:
        self.version = max(self.version, fields.get("loaded", -1))
        super().tell(**fields)

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        super().submit(requests)
        loop = asyncio.get_running_loop()
        for request in requests:
            timer = loop.call_later(self.duration(request), self._finish, request)
            self._running[request.sequence] = (request, timer)

    def drop(self, sequences: tuple[SequenceId, ...]) -> None:
        super().drop(sequences)
        for name in sequences:
            self._end(name)

    def report(self, number: int) -> EngineReport:
        self._next["tokens"] = TokenBlock(self._next.pop("tokens", {}))
        return super().report(number)

    def _finish(self, request: SequenceRequest) -> None:
        name, tokens, finished = request.sequence, self._next.get("tokens", {}), self._next.get("finished", {})
        self._end(name)
        ids = np.full(self.tokens, sum(name) % 7, np.int32)
        new = GeneratedTokens(ids, np.full(self.tokens, -0.5, np.float32), VersionRuns.of([self.version] * self.tokens))
        self.tell(
            tokens=tokens | {name: [request.kept, new]},
            finished=finished | {name: EndReason.STOP},
            started=self._next.get("started", {}) | {name: self.version},
        )

    def _end(self, name: SequenceId) -> None:
        if name in self._running:
            self._running.pop(name)[1].cancel()
        self.busy = bool(self._running)


class Worker(RolloutWorker):
    """A rollout worker without a process of its own. Its process, engine and weights come when the test lets them."""

    def __init__(self, host: str, engine: type[Engine]) -> None:
        self.name, self._host = host, host
        self.further_hosts: tuple[str, ...] = ()
        self._order, self._log = CommandOrder(self._apply), ReportLog()
        self._changed = asyncio.Event()
        self._exchange, self._is_waiting = 0, False
        self._engine: Any = engine(self._changed.set)
        self.applied: list[ReplicaCommand] = []
        self.scheduled, self.opening, self.loading = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.scheduled, self.opening, self.loading):
            event.set()
        self.loaded: list[int] = []
        self.probed: list[int] = []
        """The versions for which it got a probe, with the version or afterwards."""
        self._arrivals = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()

    async def address(self) -> WorkerAddress:
        await self.scheduled.wait()
        return WorkerAddress(self._host, 1, further_hosts=self.further_hosts)

    async def open(self) -> None:
        await self.opening.wait()

    def _apply(self, command: ReplicaCommand) -> None:
        self.applied.append(command)
        if isinstance(command, LoadWeights):
            self._loads.add(asyncio.create_task(self._load(command.weights.manifest.version)))
            if command.weights.probe is not None:
                self.probed.append(command.weights.manifest.version)
        elif isinstance(command, ProbeWeights):
            self.probed.append(command.version)
        elif isinstance(command, SleepEngine):
            self._engine.sleep()
        elif isinstance(command, WakeEngine):
            self._engine.wake()
            if command.reload:
                self._loads.add(asyncio.create_task(self._load(self.loaded[-1])))
        else:
            super()._apply(command)

    async def _load(self, version: int) -> None:
        async with self._arrivals:
            await self.loading.wait()
            self.loaded.append(version)
            self._engine.tell(loaded=version)


class Handle:
    """The handle of an actor, which is `worker`: `handle.method.remote(…)`. Tests decide what happens to calls.

    faults[method] are those of the next calls, one for each:
    request: ActorUnavailableError, and it is never carried out; late: the same, and it is carried out after LATE_SECONDS;
    reply: ActorUnavailableError after it was carried out; slow: carried out after LATE_SECONDS; hang: never answered;
    lose: its process ends before it is carried out; "": as usual.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.died = asyncio.Event()
        self.killed = False
        self.death: Exception = RayActorError(error_msg="its process ended")
        self.unreachable = False
        self.hangs: set[str] = set()
        """Methods that never answer."""
        self.faults: defaultdict[str, deque[str]] = defaultdict(deque)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._late: set[asyncio.Task[object]] = set()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *arguments: self._call(method, arguments))

    def die(self, error: Exception | None = None) -> None:
        """End its process: calls under way and later ones raise `error`, or a RayActorError."""
        self.death = error or self.death
        self.died.set()

    def _call(self, method: str, arguments: tuple[object, ...]) -> asyncio.Future[object]:
        self.counts[method] += 1
        call = asyncio.ensure_future(self._answer(method, arguments))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return call

    async def _answer(self, method: str, arguments: tuple[object, ...]) -> object:
        fault = self.faults[method].popleft() if self.faults[method] else ""
        act: Callable[[], Coroutine[Any, Any, object]] = lambda: getattr(self.worker, method)(*arguments)  # noqa: E731
        if fault == "lose":
            self.die()
        if self.died.is_set():
            raise self.death
        if self.unreachable or fault in ("request", "late"):
            if fault == "late":
                self._late.add(asyncio.ensure_future(self._later(act)))
            raise ActorUnavailableError("the connection was lost", None)
        work = asyncio.ensure_future(self._later(act) if fault == "slow" else self._act(method, fault, act))
        died = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            work.cancel()
        if self.died.is_set():
            raise self.death
        if self.unreachable or fault == "reply":
            raise ActorUnavailableError("the connection was lost", None)
        if (error := work.exception()) is not None:
            assert isinstance(error, Exception)
            raise RayTaskError(method, "Traceback …", error, ip="127.0.0.1").as_instanceof_cause()
        return work.result()

    async def _act(self, method: str, fault: str, act: Callable[[], Coroutine[Any, Any, object]]) -> object:
        if method in self.hangs or fault == "hang":
            await asyncio.Event().wait()
        return await act()

    async def _later(self, act: Callable[[], Coroutine[Any, Any, object]]) -> object:
        await asyncio.sleep(LATE_SECONDS)
        return await act()


class Actor(Handle):
    """The handle of a rollout worker."""

    worker: Worker

    def __init__(self, host: str = "pod", engine: type[Engine] = Engine) -> None:
        super().__init__(Worker(host, engine))
        self.engine: Engine = self.worker._engine


def kill(actor: Handle) -> None:
    """As `ray.kill`."""
    actor.killed = True
    actor.die()


def play(patch: pytest.MonkeyPatch) -> None:
    """Let the pool's `ray.kill` end stand-ins."""
    patch.setattr(ray, "kill", kill)


def weights(version: int) -> PublishedWeights:
    return PublishedWeights(WeightManifest(version, WeightLayout((), 0), ()), StoredBuckets((), changes_follow=False))


async def until(condition: Callable[[], object], step: float = 0.05) -> None:
    """Until it holds, which is looked at every `step` seconds."""
    async with asyncio.timeout(VIRTUAL_PATIENCE):
        while not condition():  # noqa: ASYNC110, anything may make it true
            await asyncio.sleep(step)


async def settled() -> None:
    """Everything that can happen without time has happened."""
    for _ in range(50):
        await asyncio.sleep(0)
