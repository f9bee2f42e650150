"""A function whose calls run in worker processes: a call that hangs is killed, and does not delay other calls.

    call(arguments) ─► an idle process? ──────── yes ──► send, wait: timeout_seconds ─► score, or the error
                          │ no                               │ late
                          ▼                                  └─► kill its process group; its place is free
                       wait in order ◄─── a process is idle again, or was added

When a call has waited for GROW_SECONDS, processes are added, up to `cores` + 2 × (number of slow calls) and at most
`processes`. A call is slow once it has run for GROW_SECONDS. A process that has had no call for IDLE_SECONDS is ended,
unless it is the only one.

waits on             unblocked by                               deadline
load                 the process, or its death                  LOAD_SECONDS
call: a process      another call's end, or an added process    the sum of the time-outs of the calls before it
call: its score      the process, or its death                  timeout_seconds, from the moment it is sent

A coroutine function has one process, which runs all calls at the same time and cancels a late call. If a cancelled
call does not end within BLOCKED_SECONDS, the process is killed, because the function blocks the event loop or
ignores the cancellation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Final

from qwen35_trainer.rewards.child_process import ChildEnded, ChildProcess, end_all
from qwen35_trainer.rewards.function_process import ENTRY
from qwen35_trainer.rewards.reward import RewardError, RewardTimeoutError, as_score

logger = logging.getLogger(__name__)

LOAD_SECONDS: Final = 120.0
GROW_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 60.0
BLOCKED_SECONDS: Final = 2.0
"""Time in which a cancelled call of a coroutine function must end. Then the function's process is killed."""
MAX_REQUEST_BYTES: Final = 64 * 2**20
MAX_REPLY_BYTES: Final = 2**20
_ENDED_BY_TIMER: Final = "signal SIGALRM"
_TRIES: Final = 2
"""Maximum number of times that a call of a coroutine function is sent.

All calls of the function share one process. If another call makes the process die, the call is sent to a new process.
"""

type _Waiter = tuple[asyncio.Future[ChildProcess | None], float]
"""A call that waits for a process: a future, and the time at which the wait began, in seconds of `time.monotonic`.

The future's result is a process for the call, or None if the call should look for a process again."""


class IsolatedFunction:
    """A function in worker processes. Each process loads it by `loader(*arguments)`; `call` runs it in
    one of the processes.

    loader: `module:function`, which must be importable.
    arguments: arguments of the loader. They are pickled, as are the arguments of calls, so they should be plain data.
    timeout_seconds: limit of a call, from the moment a process gets the call.
    processes: maximum number of worker processes of a plain function. A coroutine function has one.
    cores: maximum number of worker processes while no call has run for GROW_SECONDS.
    output: file descriptor to which the worker processes print; None: they print to the output of this process.

    Only one event loop may use the object.
    """

    def __init__(
        self,
        loader: str,
        arguments: tuple[object, ...],
        timeout_seconds: float,
        *,
        processes: int = 1,
        cores: int = 1,
        output: int | None = None,
    ) -> None:
        self._setup = pickle.dumps((loader, arguments, timeout_seconds))
        self._timeout = timeout_seconds
        self._most, self._cores, self._output = processes, cores, output
        self._idle: list[tuple[ChildProcess, float]] = []  # the last one was used last
        self._busy: dict[ChildProcess, float] = {}  # the second at which its call began
        self._starting = 0
        self._loading: set[ChildProcess] = set()
        self._waiters: deque[_Waiter] = deque()
        self._growth: asyncio.TimerHandle | None = None
        self._shrinking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.asynchronous = False
        """Whether the function is a coroutine function. False until the function is loaded."""

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Ids of the processes that have loaded the function."""
        return tuple(process.process_id for process in (*self._busy, *(process for process, _ in self._idle)))

    async def load(self) -> None:
        """Start a process and load the function in it.

        Raises RewardError if the process cannot be started or the function cannot be loaded.
        """
        await self._add()

    async def call(self, *arguments: object) -> float:
        """Call the function with `arguments`, and return its score.

        Raises RewardTimeoutError if the call takes longer than timeout_seconds, and RewardError if it
        fails in another way.
        """
        request = _request(arguments)
        for _ in range(_TRIES):
            process = await self._take()
            try:
                reply = await self._reply(process, request)
            finally:
                self._give(process)
            if reply is not None:
                return as_score(reply["score"])
        raise RewardError("the process of the function died, and another one that repeated the call", kind="WorkerDied")

    async def close(self) -> None:
        """End the processes. Running and waiting calls raise RewardError. May be called again."""
        self._closed = True
        self._wake(len(self._waiters))
        for timer in (self._growth, self._shrinking):
            if timer is not None:
                timer.cancel()
        await end_all([*self._loading, *self._busy, *(process for process, _ in self._idle)])
        await asyncio.gather(*self._tasks)

    async def _reply(self, process: ChildProcess, request: bytes) -> Mapping[str, object] | None:
        """Send a call to a process, and return the reply.

        Raises RewardTimeoutError if the call takes too long, and RewardError if the function fails or the
        process dies. If the process of a coroutine function dies, returns None instead: another call in this
        process may be the cause.
        """
        no_score = f"no score within timeoutSeconds {self._timeout:g}"
        late = f"{no_score}; the call was {'cancelled' if self.asynchronous else 'ended'}"
        seconds = self._timeout + (BLOCKED_SECONDS if self.asynchronous else 0.0)
        try:
            reply = _decoded(await process.call(request, seconds=seconds))
        except TimeoutError as error:
            await process.end()
            if self.asynchronous:
                late = f"{no_score}; the function blocked its event loop or ignored its cancellation, and its process was ended"
            raise RewardTimeoutError(late) from error
        except asyncio.CancelledError:
            # The process is still busy with the call, and must not get another one.
            if not self.asynchronous:
                await process.end()
            raise
        except (ChildEnded, ValueError) as error:
            how = await process.end()
            if self._closed:
                raise _closed() from error
            if process.refused:
                raise RewardError(f"{process.refused} as the reply to a call", kind="ReplyTooLong") from error
            if how == _ENDED_BY_TIMER:
                raise RewardTimeoutError(late) from error
            if self.asynchronous:
                return None
            raise RewardError(f"the worker process died ({how})", kind="WorkerDied") from error
        if "late" in reply:
            raise RewardTimeoutError(late)
        if "error" in reply:
            raise _received(reply)
        return reply

    # Processes and the calls that wait for one.

    async def _take(self) -> ChildProcess:
        """Wait for a process that can run a call, and return it. Raises RewardError if a needed
        process cannot be started.
        """
        while True:
            if self._closed:
                raise _closed()
            while self._idle:
                process, _ = self._idle[-1] if self.asynchronous else self._idle.pop()
                if process.alive:
                    if not self.asynchronous:
                        self._busy[process] = time.monotonic()
                    return process
                if self.asynchronous:
                    self._idle.clear()
            if not self._busy and not self._starting:
                await self._add()
            elif (process_or_none := await self._wait()) is not None:
                return process_or_none

    async def _wait(self) -> ChildProcess | None:
        waiter: asyncio.Future[ChildProcess | None] = asyncio.get_running_loop().create_future()
        self._waiters.append((waiter, time.monotonic()))
        self._watch()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and (process := waiter.result()) is not None:
                self._give(process)
            raise

    def _give(self, process: ChildProcess) -> None:
        """Return a process after a call. The next waiting call gets it, unless the process has ended."""
        if self.asynchronous:
            self._idle = [entry for entry in self._idle if entry[0].alive]
            return
        self._busy.pop(process, None)
        if process.alive and not self._closed:
            self._offer(process)
        else:
            # Its place is free: the first call that waits may start a process.
            self._wake(1)

    def _offer(self, process: ChildProcess) -> None:
        """Give a process to the first waiting call. If no call waits, the process becomes idle."""
        now = time.monotonic()
        while self._waiters:
            waiter, _ = self._waiters.popleft()
            if not waiter.done():
                self._busy[process] = now
                waiter.set_result(process)
                return
        self._idle.append((process, now))
        self._watch_idle()

    def _wake(self, count: int) -> None:
        """Make the first `count` waiting calls look for a process again."""
        while count and self._waiters:
            waiter, _ = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    async def _add(self) -> None:
        """Start a process that loads the function, and offer it to the waiting calls.

        Raises RewardError if the process cannot start or the function cannot load.
        """
        self._starting += 1
        try:
            process = await self._start()
        except BaseException:
            self._starting -= 1
            self._wake(1)
            raise
        self._starting -= 1
        if self.asynchronous:
            self._idle.append((process, time.monotonic()))
            self._wake(len(self._waiters))
        else:
            self._offer(process)

    async def _start(self) -> ChildProcess:
        """Start a process, load the function in it, and return the process.

        Raises RewardError if the process cannot start or the function cannot load.
        """
        if self._closed:
            raise _closed()
        try:
            process = await ChildProcess.start(ENTRY, max_reply_bytes=MAX_REPLY_BYTES, output=self._output)
        except OSError as error:
            raise RewardError(f"no worker process could be started: {error}", kind="NoWorker") from error
        self._loading.add(process)
        try:
            self.asynchronous = await self._loaded(process)
        except BaseException:
            await process.end()
            raise
        finally:
            self._loading.discard(process)
        return process

    async def _loaded(self, process: ChildProcess) -> bool:
        """Load the function in a process, and return whether it is a coroutine function.

        Raises RewardError if the function cannot load.
        """
        try:
            reply = _decoded(await process.call(self._setup, seconds=LOAD_SECONDS))
        except TimeoutError as error:
            raise RewardError(f"the function was not loaded within {LOAD_SECONDS:g} s", kind="LoadTimeout") from error
        except (ChildEnded, ValueError) as error:
            raise RewardError(f"the worker process died ({await process.end()})", kind="WorkerDied") from error
        if self._closed:
            raise _closed()
        if "error" in reply:
            raise _received(reply)
        return bool(reply.get("asynchronous"))

    # The number of processes.

    def _watch(self) -> None:
        if self._growth is None and not self._closed:
            self._growth = asyncio.get_running_loop().call_later(GROW_SECONDS, self._grow)

    def _grow(self) -> None:
        """Add processes, up to the limit, if the first waiting call has waited for GROW_SECONDS."""
        self._growth = None
        while self._waiters and self._waiters[0][0].done():
            self._waiters.popleft()
        if not self._waiters or self._closed:
            return
        self._watch()
        now = time.monotonic()
        if self._starting or self.asynchronous or now - self._waiters[0][1] < GROW_SECONDS:
            return
        slow = sum(now - began >= GROW_SECONDS for began in self._busy.values())
        most = min(self._most, most_processes(self._cores, slow))
        for _ in range(min(len(self._waiters), most - len(self._busy) - len(self._idle))):
            self._run(self._add_or_warn())

    async def _add_or_warn(self) -> None:
        try:
            await self._add()
        except RewardError as error:
            if not self._closed:
                logger.warning("no process was added for calls that wait: %s", error)

    def _shrink(self) -> None:
        """End processes that have had no call for IDLE_SECONDS, but keep at least one process."""
        self._shrinking = None
        now = time.monotonic()
        while len(self._busy) + len(self._idle) > 1 and self._idle and now - self._idle[0][1] >= IDLE_SECONDS:
            process, _ = self._idle.pop(0)
            self._run(_end(process))
        self._watch_idle()

    def _watch_idle(self) -> None:
        if self._shrinking is None and len(self._busy) + len(self._idle) > 1 and not self._closed:
            self._shrinking = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._shrink)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def most_processes(cores: int, slow: int) -> int:
    """Return the maximum number of worker processes of a function while calls are waiting for a process.

    cores: maximum while no call is slow. slow: number of calls that have run for GROW_SECONDS. Each slow call adds two
    processes, because a slow call may be waiting, for example for a server, without using its core. With two per slow
    call, the number of processes can double repeatedly while all calls are slow.
    """
    return cores + 2 * slow


async def _end(process: ChildProcess) -> None:
    await process.end()


def _request(arguments: tuple[object, ...]) -> bytes:
    """Pickle the arguments of a call. Raises RewardError if they cannot be pickled or are too large."""
    try:
        request = pickle.dumps(arguments)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RewardError(f"the arguments cannot be sent to the worker: {error}", kind="Unsendable") from error
    if len(request) > MAX_REQUEST_BYTES:
        raise RewardError(f"arguments of {len(request)} bytes; at most {MAX_REQUEST_BYTES} are sent to a reward")
    return request


def _decoded(reply: bytes) -> Mapping[str, object]:
    """Decode a reply as a JSON object.

    Raises ValueError if the bytes are anything else, which only user code in the process can cause.
    """
    decoded = json.loads(reply)
    if not isinstance(decoded, dict):
        raise ValueError("the reply is not a JSON object")  # noqa: TRY004  # the text is wrong
    return decoded


def _received(reply: Mapping[str, object]) -> RewardError:
    texts = {name: str(reply.get(name, "")) for name in ("error", "kind", "details")}
    return RewardError(texts["error"], kind=texts["kind"], details=texts["details"])


def _closed() -> RewardError:
    return RewardError("the reward is closed", kind="Closed")
