"""Ray played by threads: actors, calls and objects of a run that has only the process of the tests.

    actor = ray.remote(**options)(Driver).remote(…)     Actor: a thread. A class with coroutines has an event loop there;
      │                                                 any other takes one call at a time, and one per concurrency group
      ├─ actor.method.remote(…) ─► fault? ─► pickled ─► its thread ─► pickled ─► Call: awaited, or `ray.get`
      ├─ lose("train-0")      calls under way and later ones raise RayActorError, as when its process dies
      └─ Fault("train-0", "train", at=2, act="hang")    the second call of `train` is never answered

What crosses the border of a process is pickled with Ray's own pickler, so nothing is shared that Ray would copy, and arrays
arrive read-only. There can be one train worker: a process has one process group.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import itertools
import logging
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
import torch.distributed as dist
from ray import cloudpickle
from ray.exceptions import OwnerDiedError, RayActorError, RayTaskError

from qwen35_trainer.rewards.scoring import Scoring
from qwen35_trainer.runtime.driver import Driver
from qwen35_trainer.runtime.rollout_worker import EngineThread, RolloutWorker
from tests.patience import PATIENCE

WAITS = {("Driver", "run"), ("Driver", "follow"), ("RolloutWorker", "exchange")}
"""Calls that are under way all the time."""
STEP_SECONDS = 30.0
"""Seconds that pass at a time. They are fewer than any deadline of a call that is under way all the time."""

_actor: contextvars.ContextVar[Actor | None] = contextvars.ContextVar("actor", default=None)
_starting = threading.Lock()
"""Engines are built one after the other, since transformers sets the process's default dtype meanwhile."""


type Look = Callable[[str, str, Any], object]
"""Called with the kind of an actor, a method, and what that has answered."""


def current_actor() -> Actor | None:
    """The one whose code runs here."""
    return _actor.get()


@dataclass
class Fault:
    """At the `at`-th call of `method` of actors of `kind`, a class's name, the called actor is lost or hangs."""

    kind: str
    method: str
    at: int
    act: str
    """lose: before it is carried out. hang: it is never answered."""
    after: tuple[str, str, int] | None = None
    """A kind, a method and the number of a call, after which counting starts. None: it starts with the run."""
    fired: threading.Event = field(default_factory=threading.Event)
    _before: int | None = field(default=None, init=False)
    """Calls made before counting started; None until then."""

    @classmethod
    def hang(cls, kind: str, method: str, at: int = 1, after: tuple[str, str, int] | None = None) -> Fault:
        return cls(kind, method, at, "hang", after)

    @classmethod
    def lose(cls, kind: str, method: str, at: int = 1, after: tuple[str, str, int] | None = None) -> Fault:
        return cls(kind, method, at, "lose", after)

    def __post_init__(self) -> None:
        self._before = 0 if self.after is None else None

    def due(self, kind: str, method: str, counts: Counter[tuple[str, str]]) -> bool:
        """Whether this call triggers the fault. Must be asked at every call; `counts` includes this one."""
        if (kind, method, counts[kind, method]) == self.after:
            self._before = counts[self.kind, self.method]
        if (kind, method) != (self.kind, self.method) or self._before is None:
            return False
        return counts[kind, method] == self._before + self.at


class Call:
    """What `remote` and `put` return."""

    _all: ClassVar[weakref.WeakValueDictionary[int, Call]] = weakref.WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(self, actor: Actor | None, method: str) -> None:
        self.actor, self.method = actor, method
        """Whose call it is; of what was put, who put it there."""
        self.future: Future[Any] = Future()
        self.waits = actor is not None and (actor.kind, method) in WAITS
        """It is under way all the time, or hangs."""
        self.hangs = False
        self._number = next(self._numbers)
        self._all[self._number] = self  # found again after a reference to it was pickled

    def __await__(self) -> Any:
        if self.method == "put":
            self.argument()  # raises if it is lost with the process that put it there
        return asyncio.wrap_future(self.future).__await__()

    def __reduce__(self) -> Any:
        return _call, (self._number,)

    def settle(self, value: object = None, error: BaseException | None = None) -> None:
        # Too late where its actor is lost, or nobody waits for it any more.
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.future.set_result(value)
            else:
                self.future.set_exception(error)

    def argument(self) -> Any:
        """Its value where it is the argument of another call. Objects are lost with the process that put them there."""
        if self.actor is not None and self.actor.gone.is_set():
            raise OwnerDiedError("00" * 28, b"", "")
        return self.future.result()


def _call(number: int) -> Call:
    return Call._all[number]


class Actor:
    """Runs an object of `kind` until it is lost. It is named as the object names itself, which may change with a call."""

    def __init__(self, threads: Threads, kind: type, build: Callable[[], Any]) -> None:
        self.kind = kind.__name__
        self.gone = threading.Event()
        self.calls: list[Call] = []
        """Under way."""
        self.logs: logging.Handler | None = None
        self._threads, self._class, self._build = threads, kind, build
        self._built: Future[Any] = Future()
        self._context = contextvars.copy_context()
        self._context.run(_actor.set, self)
        self._lock = threading.Lock()
        self.loop: _Loop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._run: Callable[[Call, bool, Callable[[], Any]], object]
        if any(inspect.iscoroutinefunction(member) for member in vars(kind).values()):
            self.loop = _Loop()
            self._ended = asyncio.Event()
            self._thread = threading.Thread(target=self._context.run, args=(self._serve,), name=self.kind, daemon=True)
            self._thread.start()
            self._run = self._run_beside
        else:
            self._lanes = {group: ThreadPoolExecutor(1) for group in (None, "saving")}
            self._lanes[None].submit(self._context.copy().run, self._construct)
            self._run = self._run_in_turn

    @property
    def name(self) -> str:
        built = self._built
        return built.result().name if built.done() and not built.cancelled() and not built.exception() else ""

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *arguments, **named: self._call(method, arguments, named))

    def lose(self, reason: str = "its process ended") -> None:
        """Returns immediately; `end` waits for its threads."""
        with self._lock:
            self.gone.set()
            calls, self.calls = self.calls, []
        for call in calls:
            call.settle(error=RayActorError(error_msg=reason))
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: it is lost already
                self.loop.call_soon_threadsafe(self._ended.set)

    def end(self) -> None:
        """Lose it, and wait until nothing of it runs."""
        self.lose()
        if self.loop is not None:
            self._thread.join()
            return
        for lane in self._lanes.values():
            lane.shutdown(cancel_futures=True)
        engine = None if self._built.cancel() or self._built.exception() else self._built.result()._engine
        if engine is not None:
            with contextlib.suppress(BaseException):  # the caller that asked for the checkpoint is lost
                engine.saved(wait=True)
        if dist.is_initialized():
            dist.destroy_process_group()

    def skip(self, seconds: float) -> None:
        """Let seconds pass on its event loop."""

        def act() -> None:
            self.loop.ahead += seconds

        with contextlib.suppress(RuntimeError):  # closed: it is lost
            self.loop.call_soon_threadsafe(act)

    def _call(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Call:
        call = Call(self, method)
        hangs = self._threads.fault(self, method)
        call.waits, call.hangs = call.waits or hangs, hangs
        with self._lock:
            if self.gone.is_set():
                call.settle(error=RayActorError(error_msg="its process ended"))
                return call
            self.calls.append(call)
        sent = _copied([_Argument(value) if isinstance(value, Call) else value for value in arguments])

        def act() -> Any:
            taken = [value.call.argument() if isinstance(value, _Argument) else value for value in sent]
            with _starting if method == "join" else contextlib.nullcontext():
                return getattr(self._built.result(), method)(*taken, **named)

        self._run(call, hangs, act)
        return call

    def _construct(self) -> None:
        try:
            with _starting:
                built = self._build()
            self._built.set_result(built)
        except BaseException as error:  # noqa: BLE001  # raised to its callers
            self._built.set_exception(error)
            self.lose(f"The actor died because of an error raised in its creation task: {error}")

    def _answered(self, call: Call, value: object = None, error: BaseException | None = None) -> None:
        if error is None:
            if self._threads.look is not None:
                self._threads.look(self.kind, call.method, value)
            call.settle(_copied(value))
        else:
            trace = "".join(traceback.format_exception(error))
            call.settle(error=RayTaskError(call.method, trace, error).as_instanceof_cause())
        with self._lock, contextlib.suppress(ValueError):  # lost meanwhile
            self.calls.remove(call)

    # A class without coroutines: a lane is a thread that takes one call at a time.

    def _run_in_turn(self, call: Call, hangs: bool, act: Callable[[], Any]) -> None:
        def run() -> None:
            if hangs:
                self.gone.wait()
            if self.gone.is_set():
                return
            try:
                value = act()
            except BaseException as error:  # noqa: BLE001  # as Ray does
                self._answered(call, error=error)
            else:
                self._answered(call, value)

        group = getattr(getattr(self._class, call.method), "__ray_concurrency_group__", None)
        self._lanes[group].submit(self._context.copy().run, run)

    # A class with coroutines: all calls run concurrently on its event loop.

    def _run_beside(self, call: Call, hangs: bool, act: Callable[[], Any]) -> None:
        async def run() -> None:
            if hangs:
                await asyncio.Event().wait()
            try:
                # `open` builds an engine, and has nothing to wait for
                with _starting if call.method == "open" else contextlib.nullcontext():
                    value = act()
                    if inspect.isawaitable(value):
                        value = await value
            except Exception as error:  # noqa: BLE001  # as Ray does
                self._answered(call, error=error)
            else:
                self._answered(call, value)

        with contextlib.suppress(RuntimeError):  # closed: it is lost
            self.loop.call_soon_threadsafe(lambda: self._tasks.add(self.loop.create_task(run())))

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._construct()
        await self._ended.wait()
        engine = getattr(self._built.result(), "_engine", None) if self._built.exception() is None else None
        if isinstance(engine, EngineThread):  # it would tell a loop that is closed
            engine.close()
            await asyncio.to_thread(engine._thread.join)


class _Loop(asyncio.SelectorEventLoop):
    """Its clock can be put forward, and it knows what it waits for in threads and in the processes of rewards."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0
        self.elsewhere: set[asyncio.Future[Any]] = set()

    def run_in_executor(self, *arguments: Any) -> asyncio.Future[Any]:
        return self.wait(super().run_in_executor(*arguments))

    def wait(self, work: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """Remember that `work` is done elsewhere."""
        self.elsewhere.add(work)
        work.add_done_callback(self.elsewhere.discard)
        return work

    def time(self) -> float:
        return super().time() + self.ahead


def _elsewhere(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A method that waits for processes, as the loop of its caller knows."""

    async def known(*arguments: Any, **named: Any) -> Any:
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(method(*arguments, **named))
        return await (loop.wait(work) if isinstance(loop, _Loop) else work)

    return known


async def _nowhere(_: RolloutWorker) -> None:
    """A worker that takes no calls without Ray."""


@dataclass(frozen=True)
class _Argument:
    """A call whose result is the argument: Ray replaces what is not inside of something else."""

    call: Call


def _copied(value: Any) -> Any:
    buffers: list[Any] = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return cloudpickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


@dataclass
class Threads:
    """The parts of Ray that a run uses, until `shutdown`."""

    faults: tuple[Fault, ...] = ()
    look: Look | None = None
    actors: list[Actor] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls so far, by the actor's kind and the method."""

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Play Ray until `patch` is undone."""
        for name in ("init", "shutdown", "remote", "put", "get", "wait", "kill", "nodes", "get_runtime_context"):
            patch.setattr(ray, name, getattr(self, name))
        for method in ("open", "score_group"):
            patch.setattr(Scoring, method, _elsewhere(getattr(Scoring, method)))
        patch.setattr(
            RolloutWorker, "_listen", _nowhere
        )  # a connection would know no virtual time: all calls are Ray's

    def init(self, **_: object) -> None:
        """There is nothing to start."""

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "00" * 28, get_accelerator_ids=dict)

    def nodes(self) -> list[Any]:
        return []

    def remote(self, **_: object) -> Callable[[type], Any]:
        def wrap(kind: type) -> Any:
            def start(*arguments: Any, **named: Any) -> Actor:
                sent, others = _copied((arguments, named))
                self.actors.append(Actor(self, kind, lambda: kind(*sent, **others)))
                return self.actors[-1]

            return SimpleNamespace(remote=start)

        return wrap

    def put(self, value: object) -> Call:
        call = Call(_actor.get(), "put")
        call.settle(_copied(value))
        return call

    def get(self, call: Call | list[Call], timeout: float | None = None) -> Any:
        if isinstance(call, list):
            return [self.get(each, timeout) for each in call]
        if call.method == "put" and call.actor is not None and call.actor.gone.is_set():
            raise OwnerDiedError("00" * 28, b"", "")
        return call.future.result(timeout)

    def wait(
        self, calls: list[Call], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Call], list[Call]]:
        done, _ = concurrent.futures.wait([call.future for call in calls], timeout)
        return [call for call in calls if call.future in done], [call for call in calls if call.future not in done]

    def kill(self, actor: Actor) -> None:
        self._lose(actor, "it was killed")

    def _lose(self, actor: Actor, reason: str) -> None:
        """Lose an actor. The caller of a driver, the command, continues when nothing of it runs: it writes to the same files."""
        actor.lose(reason)
        if actor.kind == Driver.__name__:
            actor.end()

    def shutdown(self) -> None:
        """End all actors. The driver is lost first: it would write down that it has lost the others."""
        for actor in self.actors:
            actor.lose()
        for actor in reversed(self.actors):
            actor.end()

    def let_pass(self, seconds: float) -> bool:
        """Let up to STEP_SECONDS pass for the driver and the replicas, provided that the driver waits: for time alone, or for calls
        that wait or hang. Returns whether they have passed; True if the run has ended.

        The calls of replicas that are under way all the time have been answered then: their deadlines begin again.
        """
        assert seconds <= STEP_SECONDS
        drivers = [actor for actor in self.actors if actor.kind == "Driver" and not actor.gone.is_set()]
        if not drivers:
            return True
        [driver] = drivers
        under_way = [call for actor in self.actors if actor.kind == "RolloutWorker" for call in list(actor.calls)]

        async def skip() -> bool:
            assert driver.loop is not None
            for _ in range(50):  # turns of the loop, in which the driver acts on what it has received
                await asyncio.sleep(0)
                if driver.loop.elsewhere or not all(call.waits for actor in self.actors for call in list(actor.calls)):
                    return False
            driver.loop.ahead += seconds
            return True

        skipped = asyncio.run_coroutine_threadsafe(skip(), driver.loop)
        while not skipped.done() and not driver.gone.is_set():
            concurrent.futures.wait([skipped], 0.1)
        if driver.gone.is_set():
            return True
        if not skipped.result():
            return False
        for actor in self.actors:
            if actor.kind == "RolloutWorker":
                actor.skip(seconds)
        deadline = time.monotonic() + PATIENCE
        while not all(call.hangs or call.future.done() for call in under_way):  # `wait` ignores cancelled futures
            assert time.monotonic() < deadline, "a replica does not answer"
            time.sleep(0.002)
        return True

    def fault(self, actor: Actor, method: str) -> bool:
        """Called at each call. Whether it is to hang."""
        self.counts[actor.kind, method] += 1
        for fault in self.faults:
            if fault.due(actor.kind, method, self.counts):
                fault.fired.set()
                if fault.act == "hang":
                    return True
                self._lose(actor, "its process ended")
        return False
