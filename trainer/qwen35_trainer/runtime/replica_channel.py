"""The ordered, acknowledged channel between the driver and one replica: commands one way, reports the other.

    driver: ReplicaChannel                                       rollout worker
    send(command) ─► queue ─┬─ exchange(after, batch) ─────────► CommandOrder: applies each number once, in order
                            │                                    ReportLog: keeps reports until a call acknowledges them
    receive()    ◄──────────┼─ reports ◄──────────────────────── when a group has finished, or after a while
                            └─ obey(batch) ────────────────────► commands that were queued while `exchange` waits

waits on               unblocked by                                   deadline
exchange               a finished group, weights, time, …             MAX_REPORT_SECONDS + ANSWER_SECONDS
obey                   the worker has the commands                    ANSWER_SECONDS
an unreachable worker  the network works again: calls repeat          UNREACHABLE_SECONDS

Ray starts the calls of an asynchronous actor in any order, and a call may be carried out although its answer is lost.
Commands and reports are therefore numbered from 1. A repeated call applies no command twice, and returns again the
reports that a lost answer contained. A call takes about 1 ms of the driver's processor time, so commands and reports
travel together where possible: commands that result from a report go with the next `exchange`. Both are pickled to bytes
before Ray gets them, because Ray inspects every object of a message in Python. Large arrays stay out of the pickle: Ray gives
the driver an array without copying it. The classes of messages have no slots, because pickling a dataclass with slots runs
Python code for each of its fields.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import EndReason, SequenceRequest
from qwen35_trainer.runtime.calls import ActorUnreachable, answer, stalled
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from qwen35_trainer.runtime.step_times import NO_STEPS, MeasuredSteps
from qwen35_trainer.runtime.worker_connection import ConnectionEnded, Endpoint, Packed, WorkerConnection, unpack
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.probe import Probe, ProbeResult
from qwen35_trainer.weights.published import PublishedWeights, RegisteredCopy, StoredBuckets

logger = logging.getLogger(__name__)

MAX_REPORT_SECONDS = 20.0
"""Maximum time after which a worker answers `exchange`. While sequences are short, it answers every second."""
ANSWER_SECONDS = 30.0
"""Maximum time in which a worker answers a call, in addition to the time that the call lets it wait.

Answers do not wait for the engine.
"""
UNREACHABLE_SECONDS = 30.0
"""Maximum time for which calls to an unreachable worker are repeated. After this time the replica counts as lost."""
RECONNECT_SECONDS = 60.0
"""Minimum time between two attempts to connect to a worker. Until an attempt succeeds, calls travel through Ray."""
_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class SubmitSequences:
    """A command to a replica: generate the given sequences."""

    requests: tuple[SequenceRequest, ...]


@dataclass(frozen=True)
class DropSequences:
    """A command to a replica: stop generating the given sequences, and report no more of their tokens."""

    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True)
class TakeSequences:
    """A command to a replica: stop generating the given sequences, and report all their tokens.

    A sequence that has already finished is reported as finished instead.
    """

    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True)
class LoadWeights:
    """A command to a replica: fetch a version of the weights, verify it, and use it. Running sequences continue.

    If the version has a probe, the replica then compares its log-probs with the trainer's.
    """

    weights: PublishedWeights


@dataclass(frozen=True)
class ProbeWeights:
    """A command to a replica: compute log-probs with the weights of a version, and compare them with the trainer's.

    The driver sends this command if the trainer finished the log-probs of `probe` only after `LoadWeights` for the
    version was sent. The replica first loads all versions that were sent before this command. If another version is
    then in service, the replica ignores the command.
    """

    version: int
    probe: Probe


@dataclass(frozen=True)
class SleepEngine:
    """A command to a replica: give back the memory of its devices.

    The replica first loads all versions that were sent before this command. Sequences that it still has are dropped.
    """


@dataclass(frozen=True)
class WakeEngine:
    """A command to a sleeping replica: take the memory of its devices again.

    The replica generates as soon as it has loaded a version of the weights. reload: whether the replica loads the
    version that it had before; otherwise the driver sends the next version after this command.
    """

    reload: bool


@dataclass(frozen=True)
class CommandBatch:
    """Consecutive commands to a replica, numbered `first`, `first + 1`, …"""

    first: int
    commands: tuple[ReplicaCommand, ...]


type ReplicaCommand = (
    SubmitSequences | DropSequences | TakeSequences | LoadWeights | ProbeWeights | SleepEngine | WakeEngine
)


@dataclass(frozen=True)
class EngineReport:
    """A report of the work of a replica since its previous report."""

    number: int
    """Number of the report. The first report of a replica has number 1."""
    started: Mapping[SequenceId, int] = field(default_factory=dict)
    """Sequence that has started → version of its first token."""
    progress: TokenBlock = field(default_factory=TokenBlock)
    """New tokens of running sequences."""
    lengths: Mapping[SequenceId, int] = field(default_factory=dict)
    """Sequence in `progress` → number of all its tokens that were reported, and of those with which it came."""
    tokens: TokenBlock = field(default_factory=TokenBlock)
    """All tokens of the finished and taken sequences, those with which they came included."""
    finished: Mapping[SequenceId, EndReason] = field(default_factory=dict)
    """Finished sequence → reason why it ended."""
    errors: Mapping[SequenceId, str] = field(default_factory=dict)
    """Finished sequence that ended with ERROR → message of the error."""
    taken: tuple[SequenceId, ...] = ()
    """Sequences that the replica has stopped generating because of the command `TakeSequences`."""
    choices: tuple[SequenceId, ...] = ()
    """Finished and taken sequences for which the replica has recorded the chosen experts: all that it has computed for them. The
    driver claims them by `RolloutWorker.stored_choices`, which returns them in this order."""
    loaded: int | None = None
    """The newest version that was loaded since the previous report. None: no version was loaded."""
    copy: RegisteredCopy | None = None
    """The memory in which other replicas can read the version `loaded`. None: they cannot, or no version was loaded."""
    unread: int | None = None
    """The newest version that could not be read from another replica since the previous report, so that it must be sent again."""
    probed: ProbeResult | None = None
    """The result of the last probe since the previous report, which the replica has passed. None: no probe ended."""
    probes_dropped: int = 0
    """Number of probes since the previous report that ended without a result: another version was in service, or came into
    service before, or no slot became free."""
    slept: MemoryChange | None = None
    """The memory that the engine has given back since the previous report. None: it did not fall asleep."""
    woken: bool = False
    """Whether the engine has taken its memory again since the previous report."""
    generated: int = 0
    """Number of tokens that were generated since the previous report. A later report may contain their ids."""
    intervals: tuple[tuple[float, float], ...] = ()
    """(start, end) of each interval in which the engine had sequences, in Unix seconds."""
    steps: int = 0
    """Number of steps of the engine since it was built."""
    measured: MeasuredSteps = NO_STEPS
    """The durations of the steps since the previous report."""
    busy: bool = False
    """Whether the engine has sequences to generate, or commands that it has not carried out."""


def packed_commands(batch: CommandBatch) -> CommandBatch | bytes:
    """Return commands as pickled bytes, or unchanged if they refer to weights in Ray's object store.

    Only Ray can pickle a reference to one of its objects.
    """
    if any(isinstance(each, LoadWeights) and isinstance(each.weights.source, StoredBuckets) for each in batch.commands):
        return batch
    return pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked_commands(packed: CommandBatch | bytes) -> CommandBatch:
    """Return the commands from which `packed_commands` made `packed`."""
    if isinstance(packed, CommandBatch):
        return packed
    batch: CommandBatch = pickle.loads(packed)  # noqa: S301  # from the driver of this run
    return batch


class ReplicaFailed(RuntimeError):
    """A replica counts as lost: a call to it failed, its engine hangs, or it took too long to load weights, sleep or wake.

    If a call failed, the cause of the exception is the error of the call.
    """


class CommandOrder:
    """The worker's end of the channel for commands: applies each command once, in the order of its number.

    A command that arrives too early waits until all commands with lower numbers have arrived. Few commands wait, because
    the driver makes at most two calls at a time.
    """

    def __init__(self, apply: Callable[[ReplicaCommand], object]) -> None:
        self._apply = apply
        self._next = 1
        self._early: dict[int, ReplicaCommand] = {}

    def receive(self, batch: CommandBatch) -> None:
        """Apply the commands of a batch that were not applied before.

        A command waits until all commands with lower numbers have arrived.
        """
        for number, command in enumerate(batch.commands, batch.first):
            if number >= self._next:
                self._early[number] = command
        while self._next in self._early:
            command = self._early.pop(self._next)
            self._next += 1
            self._apply(command)


class ReportLog:
    """The worker's end of the channel for reports: keeps each report until the driver acknowledges it."""

    def __init__(self) -> None:
        self._kept: deque[EngineReport] = deque()
        self._last = 0

    @property
    def next_number(self) -> int:
        return self._last + 1

    def add(self, report: EngineReport) -> None:
        """Keep a report until it is acknowledged. The number of the report must be `next_number`."""
        self._kept.append(report)
        self._last = report.number

    def after(self, acknowledged: int) -> tuple[EngineReport, ...]:
        """Drop the reports up to number `acknowledged`, which the driver has received, and return all later reports."""
        while self._kept and self._kept[0].number <= acknowledged:
            self._kept.popleft()
        return tuple(self._kept)


class ReplicaChannel:
    """The driver's end of the channel: sends commands to one replica, and receives its reports.

    One task calls `receive` again and again, always in the same event loop.
    """

    def __init__(self, actor: Any, name: str) -> None:  # noqa: ANN401  # Ray's handles are untyped
        """Open the channel to a replica.

        actor: Ray's handle of the RolloutWorker. name: the replica's name, for errors.
        """
        self._actor, self._name = actor, name
        self._queue: list[ReplicaCommand] = []
        self._changed = asyncio.Event()  # a command was queued, or `exchange` is done
        self._next_command = 1
        self._received = 0  # number of the last report
        self._answers_follow = False  # the last reports will make the coordinator send commands
        self._failure: ReplicaFailed | None = None  # raised by the next call: the last reports came before it
        self._endpoint: Endpoint | None = None
        self._connection: WorkerConnection | None = None
        self._connecting: asyncio.Task[None] | None = None  # an attempt to connect again
        self._connect_at = 0.0  # time of the next attempt, on the event loop's clock

    async def connect(self, endpoint: Endpoint | None) -> None:
        """Let calls travel over a connection to the worker's endpoint.

        endpoint: None if the worker has no endpoint; calls then travel through Ray. If connecting fails, calls travel
        through Ray until a later attempt succeeds.
        """
        self._endpoint = endpoint
        if endpoint is not None:
            await self._connect(endpoint)

    def close(self) -> None:
        """End the connection, or the attempt to connect again."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    def send(self, command: ReplicaCommand) -> None:
        """Queue a command.

        If a call of `receive` is in progress, it sends the command; otherwise the next call does.
        """
        self._queue.append(command)
        self._changed.set()

    async def receive(self) -> tuple[EngineReport, ...]:
        """Send queued commands, wait for the next reports, and return them.

        The worker sends reports after about MAX_REPORT_SECONDS at the latest. Raises ReplicaFailed if a call to the worker
        fails. If reports arrived before the failure, this call of `receive` returns these reports, which may contain
        finished sequences, and the next call raises ReplicaFailed.
        """
        if self._failure is not None:
            raise self._failure
        if self._answers_follow:
            # In the next turn of the event loop, the coordinator gets the reports. The commands that result go with this call.
            await asyncio.sleep(0)
        exchange = asyncio.ensure_future(self._exchange(self._take_queue()))
        exchange.add_done_callback(self._exchanged)
        try:
            while not exchange.done():
                await self._changed.wait()  # raises in another event loop than the first one
                self._changed.clear()
                if self._queue and not exchange.done():
                    await self._obey(exchange)
            reports = exchange.result()
        finally:
            exchange.cancel()
        new = tuple(report for report in reports if report.number > self._received)
        self._received = max((report.number for report in new), default=self._received)
        self._answers_follow = any(report.finished for report in new)
        return new

    async def _obey(self, exchange: asyncio.Future[tuple[EngineReport, ...]]) -> None:
        """Send queued commands while `exchange` waits for reports. Raises ReplicaFailed if the worker cannot be called.

        If `exchange` has been answered meanwhile, the next `receive` raises instead.
        """
        try:
            await self._call(
                "obey", packed_commands(self._take_queue()), act="receiving commands", seconds=ANSWER_SECONDS
            )
        except ReplicaFailed as error:
            if not exchange.done():
                raise
            self._failure = error

    def _exchanged(self, call: asyncio.Future[tuple[EngineReport, ...]]) -> None:
        """Wake `receive`, because `exchange` has been answered or has failed."""
        self._changed.set()
        if not call.cancelled():
            call.exception()  # retrieved here too, because `obey` may fail first, and asyncio logs what nobody retrieves

    async def _exchange(self, batch: CommandBatch) -> tuple[EngineReport, ...]:
        seconds = MAX_REPORT_SECONDS + ANSWER_SECONDS
        arguments = self._received, packed_commands(batch)
        answer: Packed = await self._call("exchange", *arguments, act="generating", seconds=seconds)
        reports: tuple[EngineReport, ...] = unpack(answer)
        return reports

    def _take_queue(self) -> CommandBatch:
        batch = CommandBatch(self._next_command, tuple(self._queue))
        self._next_command += len(self._queue)
        self._queue.clear()
        return batch

    async def _call(self, method: str, *arguments: object, act: str, seconds: float) -> Any:  # noqa: ANN401  # a worker's result
        """Call a method of the worker over the connection, or through Ray if there is none or it ends. Returns the result.

        Each array of a packed result has memory of its own, so that keeping one of them keeps nothing else in memory.

        act: the worker's task, for errors. seconds: deadline of each call. Raises ReplicaFailed if the worker does not answer
        before the deadline, and for the reasons of `_call_through_ray`.
        """
        needs_ray = any(isinstance(argument, CommandBatch) for argument in arguments)
        if not needs_ray and (connection := self._connected()) is not None:
            try:
                async with asyncio.timeout(seconds):
                    return await connection.call(method, *arguments)
            except ConnectionEnded:  # Ray says whether the worker has ended
                self._connection = None
            except TimeoutError:
                late = stalled(self._name, act, seconds)
                raise ReplicaFailed(str(late)) from late
        result: Packed | None = await self._call_through_ray(method, *arguments, act=act, seconds=seconds)
        if result is None:
            return None
        pickled, arrays = result
        return pickled, [array.copy() for array in arrays]  # Ray's are views of its whole message

    def _connected(self) -> WorkerConnection | None:
        """Return the connection; None if there is none. Then begin to connect again, unless the last attempt is too recent.

        Calls do not wait for the attempt, because they can travel through Ray.
        """
        is_due = asyncio.get_running_loop().time() >= self._connect_at
        is_connecting = self._connecting is not None and not self._connecting.done()
        if self._connection is None and self._endpoint is not None and is_due and not is_connecting:
            self._connecting = asyncio.create_task(self._connect(self._endpoint))
        return self._connection

    async def _connect(self, endpoint: Endpoint) -> None:
        self._connect_at = asyncio.get_running_loop().time() + RECONNECT_SECONDS
        try:
            self._connection = await WorkerConnection.connect(endpoint)
        except ConnectionEnded as error:
            logger.warning("%s: calls travel through Ray, because it cannot be connected to: %s", self._name, error)

    async def _call_through_ray(self, method: str, *arguments: object, act: str, seconds: float) -> Any:  # noqa: ANN401  # as above
        """Call a method of the worker through Ray, and repeat the call while the worker cannot be reached.

        Returns the result. Raises ReplicaFailed if the worker stays unreachable for UNREACHABLE_SECONDS, or if the call fails for
        any other reason.
        """
        loop = asyncio.get_running_loop()
        give_up: float | None = None
        while True:
            try:
                call = getattr(self._actor, method).remote(*arguments)
                return await answer(call, of=self._name, act=act, seconds=seconds)
            except ActorUnreachable as error:
                give_up = give_up or loop.time() + UNREACHABLE_SECONDS
                if loop.time() >= give_up:
                    raise ReplicaFailed(str(error)) from error
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception as error:
                raise ReplicaFailed(str(error) or type(error).__name__) from error
