"""The channel between the driver and a replica: whatever happens to calls, each command is carried out once and in order, and each
report arrives once and in order.

All that happens here waits for time alone, so the clock is virtual.
"""

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray.exceptions
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError, OwnerDiedError, RayError, RayTaskError

from qwen35_trainer.rollout.rollout_engine import EndReason, GeneratedTokens, SequenceRequest
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.calls import Stalled
from qwen35_trainer.runtime.replica_channel import (
    ANSWER_SECONDS,
    MAX_REPORT_SECONDS,
    UNREACHABLE_SECONDS,
    CommandBatch,
    CommandOrder,
    DropSequences,
    EngineReport,
    LoadWeights,
    ProbeWeights,
    ReplicaChannel,
    ReplicaCommand,
    ReplicaFailed,
    ReportLog,
    SubmitSequences,
    packed_commands,
    unpacked_commands,
)
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from qwen35_trainer.runtime.rollout_worker import EngineFailed
from qwen35_trainer.runtime.worker_connection import pack, unpack
from qwen35_trainer.weights.probe import Probe
from qwen35_trainer.weights.segment import SegmentHandle
from tests.operator.kube import virtual

from .replicas import LATE_SECONDS, Actor, VirtualTime, settled, until, weights


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return VirtualTime()


def command(number: int) -> DropSequences:
    """A command that is recognised by its number."""
    return DropSequences(((number, 0),))


def commands(*numbers: int) -> list[ReplicaCommand]:
    return [command(number) for number in numbers]


class Driver:
    """A channel, and the task that receives from it."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.channel = ReplicaChannel(actor, "rollout-0")
        self.reports: list[EngineReport] = []
        self.inbox: asyncio.Queue[EngineReport] = asyncio.Queue()
        """The reports, for a task that waits for them as the training loop does."""
        self.receiving: asyncio.Task[None]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self.receiving = asyncio.create_task(self._receive())
        try:
            yield
        finally:
            self.receiving.cancel()

    async def _receive(self) -> None:
        while True:
            for report in await self.channel.receive():
                self.reports.append(report)
                self.inbox.put_nowait(report)

    async def failure(self) -> ReplicaFailed:
        """What ends the receiving."""
        with pytest.raises(ReplicaFailed) as raised:
            await self.receiving
        return raised.value

    @property
    def numbers(self) -> list[int]:
        return [report.number for report in self.reports]

    @property
    def loaded(self) -> list[int]:
        """The contents by which tests recognise reports."""
        return [report.loaded for report in self.reports if report.loaded is not None]


@pytest.fixture
async def driver() -> Driver:
    return Driver(Actor())


def now() -> float:
    return asyncio.get_running_loop().time()


# Commands.


async def test_commands_queued_while_a_call_is_under_way_travel_together_and_in_order(driver):
    driver.actor.faults["obey"].append("slow")
    async with driver.open():
        await settled()  # `exchange` waits at the worker for reports
        driver.channel.send(command(1))
        await settled()
        driver.channel.send(command(2))
        driver.channel.send(command(3))
        await until(lambda: len(driver.actor.worker.applied) == 3)
    assert driver.actor.worker.applied == commands(1, 2, 3)
    assert driver.actor.counts["obey"] + driver.actor.counts["exchange"] <= 4


async def test_commands_that_answer_a_report_travel_with_the_call_for_the_next_one(driver):
    async def answer() -> None:
        await asyncio.wait_for(driver.inbox.get(), 60.0)  # as the training loop
        driver.channel.send(command(1))

    async with driver.open(), asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        await settled()
        driver.actor.engine.tell(finished={(0, 0): EndReason.STOP})
        await until(lambda: driver.actor.worker.applied)
    assert driver.actor.worker.applied == commands(1)
    assert driver.actor.counts["obey"] == 0


@pytest.mark.parametrize("method", ["exchange", "obey"])
@pytest.mark.parametrize("fault", ["request", "reply", "late", "slow"])
async def test_a_command_whose_call_fails_is_carried_out_once(driver, method, fault):
    driver.actor.faults[method] += [fault, fault]
    async with driver.open():
        if method == "obey":
            await settled()
        driver.channel.send(command(1))
        await asyncio.sleep(3 * LATE_SECONDS)
        driver.channel.send(command(2))
        await asyncio.sleep(3 * LATE_SECONDS)
        assert not driver.receiving.done()
    assert driver.actor.worker.applied == commands(1, 2)


async def test_commands_that_arrive_before_earlier_ones_wait_for_them():
    applied: list[ReplicaCommand] = []
    order = CommandOrder(applied.append)
    order.receive(CommandBatch(3, (command(3),)))
    order.receive(CommandBatch(4, (command(4), command(5))))
    assert applied == []
    order.receive(CommandBatch(1, (command(1), command(2))))
    assert applied == commands(1, 2, 3, 4, 5)
    order.receive(CommandBatch(4, (command(4), command(5), command(6))))
    order.receive(CommandBatch(1, (command(1),)))
    order.receive(CommandBatch(7, ()))
    assert applied == commands(1, 2, 3, 4, 5, 6)


# Reports.


async def test_a_report_whose_answer_is_lost_is_returned_again_and_counts_once(driver):
    driver.actor.faults["exchange"] += ["reply", "reply", ""]
    async with driver.open():
        driver.actor.engine.tell(loaded=7)
        await until(lambda: driver.loaded)
        driver.actor.engine.tell(loaded=8)
        await until(lambda: len(driver.loaded) == 2)
    assert driver.loaded == [7, 8]
    assert driver.numbers == sorted(set(driver.numbers))


def test_reports_are_kept_until_a_call_acknowledges_them():
    log = ReportLog()
    for number in (1, 2, 3):
        assert log.next_number == number
        log.add(EngineReport(number))
    assert [report.number for report in log.after(0)] == [1, 2, 3]
    assert [report.number for report in log.after(2)] == [3]
    assert [report.number for report in log.after(0)] == [3], "a call that was late does not bring them back"
    assert log.after(3) == ()
    assert log.next_number == 4


async def test_tokens_that_are_kept_keep_nothing_of_rays_message_in_memory(driver):
    """The test's Ray passes the worker's arrays on, as a view of a message would be."""
    count = 100_000
    tokens = GeneratedTokens(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), VersionRuns.of([0] * count))
    block = TokenBlock({(0, 0): [tokens]})
    async with driver.open():
        driver.actor.engine.tell(progress=block)
        await until(lambda: any(len(report.progress) for report in driver.reports))
    [arrived] = [report.progress for report in driver.reports if len(report.progress)]
    assert arrived[0, 0].ids.tolist() == list(range(count))
    assert not np.shares_memory(arrived._data, block._data)


def test_messages_arrive_as_they_were_sent():
    request = SequenceRequest((3, 1), np.arange(5, dtype=np.int32), 9)
    probe = Probe((np.array([3, 4, 5], np.int32),), np.zeros(2, np.float32), limit=0.1)
    sent = CommandBatch(4, (SubmitSequences((request,)), command(5), ProbeWeights(2, probe)))
    packed = packed_commands(sent)
    assert isinstance(packed, bytes), "Ray would inspect it"
    arrived = unpacked_commands(packed)
    assert (arrived.first, [type(each) for each in arrived.commands]) == (4, [type(each) for each in sent.commands])
    assert arrived.commands[1] == command(5)
    assert isinstance(arrived.commands[0], SubmitSequences)
    assert arrived.commands[0].requests[0].sequence == (3, 1)
    assert arrived.commands[0].requests[0].prompt.tolist() == [0, 1, 2, 3, 4]
    tokens = GeneratedTokens(np.arange(3, dtype=np.int32), np.float32([-1, -2, -0.5]), VersionRuns.of([0, 0, 0]))
    report = EngineReport(7, tokens=TokenBlock({(3, 1): [tokens]}), finished={(3, 1): EndReason.STOP}, loaded=2)
    (received,) = unpack(pack((report,)))
    assert (received.number, received.finished, received.loaded) == (7, report.finished, 2)
    assert received.tokens[3, 1].ids.tolist() == [0, 1, 2]
    assert received.tokens[3, 1].log_probs.tolist() == [-1, -2, -0.5]


def test_large_arrays_of_a_report_are_not_copied_into_its_pickle():
    count = 100_000
    tokens = GeneratedTokens(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), VersionRuns.of([0] * count))
    pickled, arrays = pack((EngineReport(1, tokens=TokenBlock({(0, 0): [tokens]})),))
    assert len(pickled) < 2000
    assert [array.nbytes for array in arrays] == [8 * count]
    (received,) = unpack((pickled, arrays))
    assert received.tokens[0, 0].ids.tolist() == list(range(count))
    assert np.shares_memory(received.tokens._data, arrays[0])


def test_ray_pickles_commands_with_weights_in_its_object_store():
    """A reference that Ray does not see in a message does not keep its object."""
    batch = CommandBatch(1, (command(1), LoadWeights(weights(1))))
    assert packed_commands(batch) is batch
    assert unpacked_commands(batch) is batch


def test_weights_elsewhere_are_pickled_like_other_commands():
    segment = replace(weights(1), source=SegmentHandle("weights", 64, ((17, 5),)))
    batch = CommandBatch(1, (command(1), LoadWeights(segment)))
    packed = packed_commands(batch)
    assert isinstance(packed, bytes)
    assert unpacked_commands(packed) == batch


async def test_a_replica_without_sequences_reports_at_intervals(driver):
    async with driver.open():
        await asyncio.sleep(10 * driver.actor.engine.report_seconds)
    assert 9 <= len(driver.reports) <= 10


async def test_sequences_that_finish_shortly_after_one_another_are_reported_together(driver):
    engine = driver.actor.engine
    engine.gather_seconds = 0.5
    async with driver.open():
        await asyncio.sleep(0.1)
        before, finished = now(), dict[tuple[int, int], EndReason]()
        for index in range(3):
            finished[index, 0] = EndReason.STOP
            engine.tell(finished=dict(finished))
            await asyncio.sleep(0.1)
        await until(lambda: any(report.finished for report in driver.reports), step=0.01)
        assert now() - before == pytest.approx(0.5, abs=0.05)
    assert [list(report.finished) for report in driver.reports if report.finished] == [[(0, 0), (1, 0), (2, 0)]]


@pytest.mark.parametrize("urgent", [{"loaded": 3}, {"taken": ((1, 0),)}])
async def test_weights_and_taken_sequences_are_reported_immediately(driver, urgent):
    """A publication waits for the first, and another replica for the second."""
    driver.actor.engine.gather_seconds = 5.0
    async with driver.open():
        await asyncio.sleep(0.1)
        driver.actor.engine.tell(finished={(0, 0): EndReason.STOP})
        await asyncio.sleep(0.1)
        before = now()
        driver.actor.engine.tell(**urgent)
        await until(lambda: any(report.finished for report in driver.reports), step=0.001)
        assert now() - before < 0.01
    [report] = [report for report in driver.reports if report.finished]
    assert (report.loaded, report.taken) == (urgent.get("loaded"), urgent.get("taken", ()))


# Failures.


async def test_an_engine_that_fails_is_the_failure_of_its_replica_immediately(driver):
    async with driver.open():
        await asyncio.sleep(0.1)
        before = now()
        driver.actor.engine.fail(IndexError("list index out of range"))
        error = await driver.failure()
    assert str(error) == "pod: IndexError: list index out of range"
    assert isinstance(error.__cause__, EngineFailed)
    assert now() - before < 0.01


@pytest.mark.parametrize("method", ["exchange", "obey"])
async def test_a_replica_that_cannot_be_reached_for_a_while_loses_nothing(driver, method):
    calls = round(UNREACHABLE_SECONDS) - 1
    async with driver.open():
        await settled()
        driver.actor.faults[method] += ["request"] * calls  # they are repeated every half second
        driver.channel.send(command(1))
        driver.actor.engine.tell(loaded=7)
        await asyncio.sleep(UNREACHABLE_SECONDS)
        assert not driver.receiving.done()
        driver.channel.send(command(2))
        await settled()
    assert driver.actor.worker.applied == commands(1, 2)
    assert driver.loaded == [7]


async def test_a_replica_that_cannot_be_reached_for_longer_has_failed(driver):
    async with driver.open():
        await settled()
        before = now()
        driver.actor.unreachable = True
        error = await driver.failure()
    assert UNREACHABLE_SECONDS <= now() - before <= UNREACHABLE_SECONDS + 2 * driver.actor.engine.report_seconds
    assert str(error).startswith("rollout-0 cannot be reached during generating: ")


@pytest.mark.parametrize(
    ("method", "seconds", "act"),
    [("exchange", MAX_REPORT_SECONDS + ANSWER_SECONDS, "generating"), ("obey", ANSWER_SECONDS, "receiving commands")],
)
async def test_a_replica_that_does_not_answer_has_failed(driver, method, seconds, act):
    driver.actor.hangs.add(method)
    before = now()
    async with driver.open():
        await settled()
        driver.channel.send(command(1))
        error = await driver.failure()
    assert isinstance(error.__cause__, Stalled)
    assert str(error).startswith(f"rollout-0 did not finish {act} within {seconds:g} s")
    assert now() - before == pytest.approx(seconds, abs=1.0)


async def test_what_a_replica_reported_before_it_failed_arrives(driver):
    """It would be lost with the replica, and finished sequences would be generated again."""
    driver.actor.hangs.add("obey")
    async with driver.open():
        await settled()
        driver.channel.send(command(1))
        await settled()
        driver.actor.engine.tell(finished={(0, 0): False})
        error = await driver.failure()
    assert isinstance(error.__cause__, Stalled)
    assert [list(report.finished) for report in driver.reports if report.finished] == [[(0, 0)]]


ARGUMENTS: dict[str, Any] = {
    "function_name": "exchange",
    "traceback_str": "Traceback …",
    "cause": ValueError("no such tensor"),
    "client_exc": ValueError("unreachable"),
    "object_ref_hex": "00" * 28,
    "owner_address": b"",
    "call_site": "",
    "message": "the message",
    "error_message": "the message",
    "original_stack_trace": "Traceback …",
}
"""Arguments of the constructors of Ray's errors, by name."""
JAVA = ray.exceptions.CrossLanguageError
"""Raised by functions in other languages, of which a run has none."""
KINDS = {
    name: kind
    for name, kind in vars(ray.exceptions).items()
    if inspect.isclass(kind) and issubclass(kind, RayError) and kind not in (JAVA, ActorUnavailableError)
}


def build(kind: type[RayError]) -> RayError:
    required = [
        each.name
        for each in inspect.signature(kind).parameters.values()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    return kind(*(ARGUMENTS[name] for name in required))


def raised_by_worker(error: BaseException) -> Callable[[], RayError]:
    """As Ray raises at the caller what a call raised."""
    return lambda: RayTaskError("exchange", "Traceback …", error, ip="127.0.0.1").as_instanceof_cause()


RAISED = {name: (lambda kind=kind: build(kind)) for name, kind in KINDS.items()} | {
    "raised ValueError": raised_by_worker(ValueError("no such tensor")),
    "raised TimeoutError": raised_by_worker(TimeoutError("inside")),
    "raised without a text": raised_by_worker(RuntimeError()),
    "raised MemoryError": raised_by_worker(MemoryError("cannot allocate")),
    "raised OwnerDiedError": raised_by_worker(OwnerDiedError("00" * 28, b"", "")),
    "raised SystemExit": lambda: RayTaskError("exchange", "SystemExit: 1", SystemExit(1), ip="127.0.0.1"),
}


@pytest.mark.parametrize("method", ["exchange", "obey"])
@pytest.mark.parametrize("build_error", RAISED.values(), ids=RAISED)
async def test_any_error_of_a_call_is_the_failure_of_that_replica(driver, monkeypatch, method, build_error):
    async def fail(*_: object) -> None:
        raise build_error()

    monkeypatch.setattr(Actor, method, property(lambda _: Remote(fail)), raising=False)
    async with driver.open():
        await settled()
        driver.channel.send(command(1))
        error = await driver.failure()
    assert str(error), "nothing says what happened"
    assert error.__cause__ is not None
    assert now() < 1.0, "it was not noticed immediately"


class Remote:
    """A method of an actor that is played by a function."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def remote(self, *arguments: object) -> asyncio.Future[object]:
        return asyncio.ensure_future(self._act(*arguments))


def test_ray_has_the_errors_that_are_meant():
    assert {"OutOfMemoryError", "ObjectLostError", "NodeDiedError", "ActorDiedError", "WorkerCrashedError"} <= set(
        KINDS
    )


async def test_a_process_that_ends_while_both_calls_are_under_way_leaves_no_error_behind(driver):
    """asyncio logs exceptions that nobody has retrieved."""
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    driver.actor.hangs.add("obey")
    async with driver.open():
        await settled()
        driver.channel.send(command(1))
        await settled()
        driver.actor.die()
        await driver.failure()
    await settled()
    gc.collect()
    assert logged == []


# Random schedules.

FAULTS = st.lists(st.sampled_from(["", "", "request", "reply", "late", "slow"]), max_size=12)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 3)),
        st.tuples(st.just("report"), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.5, 1.5, 4.0])),
    ),
    max_size=12,
)


@given(acts=ACTS, exchanges=FAULTS, obeys=FAULTS)
def test_each_command_and_each_report_arrives_once_and_in_order(acts, exchanges, obeys):
    """However often requests and replies are lost, delayed, or overtaken by later ones."""

    async def play() -> None:
        driver = Driver(Actor())
        driver.actor.faults["exchange"] += exchanges
        driver.actor.faults["obey"] += obeys
        sent = reported = 0
        async with driver.open():
            for act, amount in acts:
                match act:
                    case "send":
                        for _ in range(int(amount)):
                            sent += 1
                            driver.channel.send(command(sent))
                    case "report":
                        reported += 1
                        driver.actor.engine.tell(taken=(*driver.actor.engine._next.get("taken", ()), (reported, 0)))
                    case "wait":
                        await asyncio.sleep(amount)
            await asyncio.sleep(40.0)  # all faults are over
            assert not driver.receiving.done()
        assert driver.actor.worker.applied == commands(*range(1, sent + 1))
        assert [name for report in driver.reports for name in report.taken] == [(n, 0) for n in range(1, reported + 1)]
        assert driver.numbers == list(range(1, len(driver.numbers) + 1))

    virtual.run(play())


class Sleeping:
    """A method of a worker that answers after a minute."""

    async def remote(self, *_: object) -> tuple[EngineReport, ...]:
        await asyncio.sleep(60.0)
        return ()


def test_a_channel_that_is_used_in_a_second_event_loop_raises() -> None:
    """Otherwise it would send empty calls to the replica without a pause, which slow its engine down."""
    channel = ReplicaChannel(SimpleNamespace(exchange=Sleeping(), obey=Sleeping()), "rollout-0")

    async def briefly() -> None:
        async with asyncio.timeout(1.0):
            await channel.receive()

    for error, message in ((TimeoutError, ""), (RuntimeError, "different event loop")):
        with asyncio.Runner(loop_factory=VirtualTime().new_event_loop) as loop, pytest.raises(error, match=message):
            loop.run(briefly())
