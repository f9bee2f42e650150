"""The ordered, acknowledged channel between the driver and one replica: commands one way, reports the other.

    driver: ReplicaChannel                                 rollout worker
    send(command) ─► queue ── obey(first, commands) ─────► CommandOrder: applies each number once, in order
                           ◄── receipt: they have arrived ──
    receive()    ◄───────── reports(after, wait) ───────── ReportLog: keeps reports until a call acknowledges them

waits on               unblocked by                                   deadline
a receipt              the worker has the commands                    ANSWER_SECONDS
reports                a finished sequence, or wait_seconds           wait_seconds + ANSWER_SECONDS
an unreachable worker  the network works again: both calls repeat     UNREACHABLE_SECONDS

Ray starts the calls of an asynchronous actor in any order, and a call may be carried out although its answer is lost.
Commands and reports are therefore numbered from 1. One call of each kind is under way at a time, so commands arrive in order. A
repeated `obey` applies nothing twice, and a repeated `reports` returns what a lost answer contained.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import GeneratedTokens, SequenceRequest
from qwen35_trainer.runtime.calls import ActorUnreachable, answer
from qwen35_trainer.weights.published import PublishedWeights

REPORT_SECONDS = 1.0
"""Maximum wait of a call for reports: first tokens and progress are reported at least this often."""
ANSWER_SECONDS = 60.0
"""How long a worker may take to answer, beyond what it was asked to wait. Its answers do not wait for its engine."""
UNREACHABLE_SECONDS = 30.0
"""How long calls to a worker that cannot be reached are repeated before the replica counts as lost."""
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SubmitSequences:
    """Generate these sequences."""

    requests: tuple[SequenceRequest, ...]


@dataclass(frozen=True, slots=True)
class DropSequences:
    """Stop generating these sequences. Their tokens are not needed."""

    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class TakeSequences:
    """Stop generating these sequences, and report their last tokens. A sequence that has just finished stays finished."""

    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Fetch a version of the weights, verify it, and generate from it. Running sequences continue."""

    weights: PublishedWeights


type ReplicaCommand = SubmitSequences | DropSequences | TakeSequences | LoadWeights


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica did since its previous report."""

    number: int
    """1 for the first report of a replica."""
    started: Mapping[SequenceId, int] = field(default_factory=dict)
    """Sequence → version of its first token, of sequences that started."""
    tokens: Mapping[SequenceId, GeneratedTokens] = field(default_factory=dict)
    """New tokens of sequences: of running ones at intervals, of finished and taken ones all that were not reported yet."""
    finished: Mapping[SequenceId, bool] = field(default_factory=dict)
    """Finished sequence → whether it was cut at its token limit."""
    taken: tuple[SequenceId, ...] = ()
    """Sequences that `TakeSequences` has taken."""
    loaded: int | None = None
    """The newest version that was loaded."""
    generated: int = 0
    """Number of tokens that were generated, including those that no report contains yet."""
    intervals: tuple[tuple[float, float], ...] = ()
    """Intervals in which the engine had sequences, in wall-clock seconds."""
    steps: int = 0
    """Number of steps of the engine since it was built."""
    busy: bool = False
    """Whether the engine has sequences, or commands that it has not carried out."""


class ReplicaFailed(RuntimeError):
    """A call to a replica failed. Its cause is the error of the call: whatever it is, the replica counts as lost."""


class CommandOrder:
    """The worker's end for commands: applies each command once, in the order of its number."""

    def __init__(self, apply: Callable[[ReplicaCommand], object]) -> None:
        self._apply = apply
        self._applied = 0

    def receive(self, first: int, commands: Sequence[ReplicaCommand]) -> None:
        """Apply the commands numbered `first`, `first + 1`, … that were not applied before. Raises ValueError for a gap."""
        if first > self._applied + 1:
            raise ValueError(f"command {first} arrived after command {self._applied}")
        for number, command in enumerate(commands, first):
            if number > self._applied:
                self._applied = number
                self._apply(command)


class ReportLog:
    """The worker's end for reports: keeps each report until the driver acknowledges it."""

    def __init__(self) -> None:
        self._kept: deque[ReplicaReport] = deque()
        self._last = 0

    @property
    def next_number(self) -> int:
        return self._last + 1

    def add(self, report: ReplicaReport) -> None:
        """Keep a report, whose number is `next_number`."""
        self._kept.append(report)
        self._last = report.number

    def after(self, acknowledged: int) -> tuple[ReplicaReport, ...]:
        """Drop the reports up to number `acknowledged`, which the driver has, and return the others."""
        while self._kept and self._kept[0].number <= acknowledged:
            self._kept.popleft()
        return tuple(self._kept)


class ReplicaChannel:
    """The driver's end: sends commands to one replica, and receives its reports, while `open`."""

    def __init__(self, actor: Any, name: str) -> None:  # noqa: ANN401  # Ray's handles are untyped
        """actor: the handle of a RolloutWorker. name: the replica's name, for errors."""
        self._actor, self._name = actor, name
        self._queue: deque[ReplicaCommand] = deque()
        self._queued = asyncio.Event()
        self._sent = 0  # number of the last command that has arrived
        self._received = 0  # number of the last report
        self._sender: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Context manager: send queued commands from now on, until the end of the context."""
        self._sender = asyncio.create_task(self._send_queued())
        try:
            yield
        finally:
            self._sender.cancel()
            self._queue.clear()

    def send(self, command: ReplicaCommand) -> None:
        """Queue a command. Commands that are queued while a call is under way travel together."""
        self._queue.append(command)
        self._queued.set()

    async def receive(self) -> tuple[ReplicaReport, ...]:
        """Return the next reports, at the latest after about REPORT_SECONDS. Raises ReplicaFailed."""
        assert self._sender is not None, "the channel is not open"
        call = asyncio.ensure_future(
            self._call("reports", self._received, REPORT_SECONDS, act="generating", seconds=REPORT_SECONDS)
        )
        try:
            await asyncio.wait({call, self._sender}, return_when=asyncio.FIRST_COMPLETED)
            if self._sender.done():
                self._sender.result()  # raises: the sender ends only by a failure
            reports: tuple[ReplicaReport, ...] = await call
        finally:
            call.cancel()
        new = tuple(report for report in reports if report.number > self._received)
        self._received = max((report.number for report in new), default=self._received)
        return new

    async def _send_queued(self) -> None:
        while True:
            await self._queued.wait()
            self._queued.clear()
            commands = tuple(self._queue)
            await self._call("obey", self._sent + 1, commands, act="receiving commands", seconds=0.0)
            self._sent += len(commands)
            for _ in commands:
                self._queue.popleft()

    async def _call(self, method: str, *arguments: object, act: str, seconds: float) -> Any:  # noqa: ANN401  # an actor's result
        """Call the worker, again and again while it cannot be reached. Raises ReplicaFailed."""
        loop = asyncio.get_running_loop()
        give_up: float | None = None
        while True:
            try:
                call = getattr(self._actor, method).remote(*arguments)
                return await answer(call, of=self._name, act=act, seconds=seconds + ANSWER_SECONDS)
            except ActorUnreachable as error:
                give_up = give_up or loop.time() + UNREACHABLE_SECONDS
                if loop.time() >= give_up:
                    raise ReplicaFailed(str(error)) from error
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception as error:
                raise ReplicaFailed(str(error) or type(error).__name__) from error
