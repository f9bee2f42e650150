"""The thread around a real engine with a tiny model, and around one that is played: every token is reported."""

import asyncio
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import (
    NO_TOKENS,
    Completed,
    EndReason,
    GeneratedTokens,
    SequenceRequest,
    StepOutput,
)
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime import rollout_worker
from qwen35_trainer.runtime.replica_channel import MAX_REPORT_SECONDS, EngineReport
from qwen35_trainer.runtime.rollout_worker import (
    GATHER_SHARE,
    MAX_GATHER_SECONDS,
    MIN_GATHER_SECONDS,
    PROGRESS_SECONDS,
    PROGRESS_SHARE,
    EngineThread,
    NotFiniteLogProbs,
    RolloutWorker,
)
from qwen35_trainer.runtime.worker_connection import Endpoint, WorkerServer
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.probe import Probe
from qwen35_trainer.weights.published import PublishedWeights, StoredBuckets
from qwen35_trainer.weights.weight_manifest import WeightLayout, WeightManifest
from tests.patience import PATIENCE

NEVER = 99
"""An end token outside the vocabulary: every sequence is as long as its limit."""
MODEL = ModelSpec.model_validate(
    {"name": "tiny", "precision": "FP32"}
    | {"source": {"random": {"hiddenSize": 16, "intermediateSize": 16, "layers": 2, "fullAttentionInterval": 2}}}
)
NAME = (0, 0)


def joined(reports: Sequence[EngineReport], name: SequenceId) -> GeneratedTokens:
    """The tokens of a sequence after all reports. Its progress must be the first of all its tokens."""
    tokens = NO_TOKENS
    for report in reports:
        if name in report.progress:
            tokens = GeneratedTokens.join([tokens, report.progress[name]])
            assert report.lengths[name] == len(tokens)
        if name in report.tokens:
            before, tokens = tokens, report.tokens[name]
            assert same(before, tokens[: len(before)])
    return tokens


def same(left: GeneratedTokens, right: GeneratedTokens) -> bool:
    names = ("ids", "log_probs", "versions")
    return all(getattr(left, name).tolist() == getattr(right, name).tolist() for name in names)


class Driven:
    """An engine thread, what it has reported so far, and what its engine has completed."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.completed: list[Completed] = []
        self._step = engine.step
        engine.step = self.step
        self.woken = threading.Event()
        self.thread = EngineThread(engine, self.woken.set)
        self.reports: list[EngineReport] = []

    def step(self) -> StepOutput:
        output = self._step()
        self.completed += output.finished
        return output

    def on_thread(self, act: Callable[[], object]) -> None:
        """Have `act` done on the thread, between two steps. Raises what it raises."""
        done, errors = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001, raised below
                errors.append(error)
            done.set()

        self.thread._inbox.put(run)
        assert done.wait(PATIENCE), "the thread did not answer"
        if errors:
            raise errors[0]

    def report(self) -> EngineReport:
        self.reports.append(self.thread.report(len(self.reports) + 1))
        return self.reports[-1]

    def until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not enough():
            assert time.monotonic() < deadline, "the engine came to no end"
            self.woken.wait(0.05)
            self.woken.clear()
            self.report()

    @property
    def finished(self) -> dict[SequenceId, EndReason]:
        return {name: cut for report in self.reports for name, cut in report.finished.items()}


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    model = build(ModelSettings(MODEL, seed=0, vocabulary=20, max_length=40, base=tmp_path))
    built = Driven(TorchEngine(model, end_token=NEVER, slots=4, max_length=40, seed=1))
    yield built
    built.thread.close()


def requests(group: int, *, samples: int = 2, tokens: int = 6) -> list[SequenceRequest]:
    return [SequenceRequest((group, index), np.array([3, 4, 5], np.int32), tokens) for index in range(samples)]


@pytest.fixture
def reporting(monkeypatch) -> None:
    """Unfinished sequences are asked for their tokens at every step."""
    monkeypatch.setattr(rollout_worker, "PROGRESS_SECONDS", 0.0)


def test_every_sequence_comes_out_once_with_all_its_tokens_and_its_start(driven):
    names = [(group, index) for group in range(9) for index in range(2)]
    for first in (0, 3, 6):
        driven.thread.submit([request for group in range(first, first + 3) for request in requests(group)])
    driven.until(lambda: len(driven.finished) == 18)
    assert sorted(driven.finished) == names
    assert sum(len(report.finished) for report in driven.reports) == 18
    for completed in driven.completed:
        assert same(joined(driven.reports, completed.sequence), completed.tokens)
    assert sum(report.generated for report in driven.reports) == 18 * 6
    started = [pair for report in driven.reports for pair in report.started.items()]
    assert sorted(started) == [(name, 0) for name in names]


def test_unfinished_sequences_report_their_new_tokens_and_at_their_end_all(driven, reporting):
    def run() -> None:
        driven.thread._submit([*requests(0, samples=1, tokens=30), *requests(1, samples=6, tokens=8)])
        while driven.engine.busy:
            driven.thread._step()
            driven.report()

    driven.on_thread(run)
    assert len(driven.completed) == 7
    assert sum(NAME in report.progress for report in driven.reports) > 1
    assert all(report.progress.keys().isdisjoint(report.tokens) for report in driven.reports)
    for completed in driven.completed:
        assert same(joined(driven.reports, completed.sequence), completed.tokens)


def test_the_longer_a_sequence_is_the_more_new_tokens_it_reports_at_a_time(driven, reporting, monkeypatch):
    monkeypatch.setattr(rollout_worker, "PROGRESS_SHARE", 0.5)

    def run() -> None:
        driven.thread._submit(requests(0, samples=1, tokens=30))
        while driven.engine.busy:
            driven.thread._step()
            driven.report()

    driven.on_thread(run)
    lengths = [len(report.progress[NAME]) for report in driven.reports if NAME in report.progress]
    assert lengths == [1, 1, 1, 2, 3, 4, 6, 9], "each is at least half of those before it"
    assert same(joined(driven.reports, NAME), driven.completed[0].tokens)


def test_a_taken_sequence_reports_all_its_tokens_once_and_nothing_afterwards(driven, reporting):
    def step_and_take() -> None:
        driven.thread._submit(requests(0, tokens=30))
        driven.thread._step()  # reports one token of each
        driven.report()
        driven.thread._step()
        driven.thread._step()
        driven.thread._take([(0, 0), (5, 5)])

    driven.on_thread(step_and_take)
    assert driven.thread.has_urgent_report
    assert driven.woken.is_set()
    driven.until(lambda: len(driven.finished) == 1)
    assert [name for report in driven.reports for name in report.taken] == [(0, 0)]
    assert driven.finished == {(0, 1): EndReason.LENGTH}
    assert len(joined(driven.reports, (0, 0))) == 3
    [taken_at] = [index for index, report in enumerate(driven.reports) if report.taken]
    assert all((0, 0) not in {*report.tokens, *report.progress} for report in driven.reports[taken_at + 1 :])


def test_a_sequence_that_continues_reports_progress_only_of_tokens_that_it_did_not_come_with(driven, reporting):
    def take_and_submit() -> None:
        driven.thread._submit(requests(0, samples=1, tokens=30))
        for _ in range(7):
            driven.thread._step()
        driven.thread._take([NAME])
        driven.report()
        kept = joined(driven.reports, NAME)
        [request] = requests(0, samples=1, tokens=30)
        driven.thread._submit([SequenceRequest(NAME, request.prompt, 30, kept=kept)])

    driven.on_thread(take_and_submit)
    driven.until(lambda: bool(driven.finished))
    [completed] = driven.completed
    assert same(joined(driven.reports, NAME), completed.tokens)
    assert len(completed.tokens) == 30
    assert len(driven.reports[0].tokens[NAME]) == 7
    assert sum(len(report.progress[NAME]) for report in driven.reports if NAME in report.progress) <= 22


def test_a_sequence_that_has_finished_when_it_is_taken_is_reported_as_finished_only(driven):
    def finish_and_take() -> None:
        driven.thread._submit(requests(0, samples=1, tokens=1))
        driven.thread._step()
        driven.thread._take([NAME])

    driven.on_thread(finish_and_take)
    report = driven.report()
    assert (report.finished, report.taken, len(report.tokens[NAME])) == ({NAME: EndReason.LENGTH}, (), 1)


def test_of_a_dropped_sequence_nothing_more_is_reported(driven, reporting):
    def step_and_drop() -> None:
        driven.thread._submit(requests(0, tokens=30))
        driven.thread._step()
        driven.thread._drop([(0, 0), (7, 7)])
        driven.thread._step()

    driven.on_thread(step_and_drop)
    driven.until(lambda: bool(driven.finished))
    assert driven.finished == {(0, 1): EndReason.LENGTH}
    for report in driven.reports:
        assert (0, 0) not in {*report.tokens, *report.progress, *report.lengths, *report.started, *report.taken}
    for table in (driven.thread._reported, driven.thread._unsent, driven.thread._submitted, driven.thread._kept):
        assert not table, "it remembers sequences that it no longer has"


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Driven]:
    """The engine of a mixture of experts, which records the experts."""
    random = {"hiddenSize": 16, "intermediateSize": 16, "layers": 2, "fullAttentionInterval": 2, "experts": 4}
    spec = ModelSpec.model_validate({"name": "tiny", "precision": "FP32", "source": {"random": random}})
    model = build(ModelSettings(spec, seed=0, vocabulary=20, max_length=40, base=tmp_path))
    built = Driven(TorchEngine(model, end_token=NEVER, slots=4, max_length=40, seed=1, records_choices=True))
    yield built
    built.thread.close()


def test_chosen_experts_are_kept_once_for_each_sequence_that_leaves_and_do_not_travel_with_its_tokens(
    recording, reporting
):
    def run() -> None:
        [evaluated] = requests(9, samples=1, tokens=8)
        recording.thread._submit([*requests(0, tokens=8), replace(evaluated, trains=False)])
        for _ in range(4):
            recording.thread._step()
        recording.thread._take([NAME])
        recording.report()
        kept = joined(recording.reports, NAME)
        [request, _] = requests(0, tokens=8)
        recording.thread._submit([replace(request, kept=kept), *requests(1, samples=1, tokens=8)])
        recording.thread._step()
        recording.thread._drop([(1, 0)])
        while recording.engine.busy:
            recording.thread._step()

    recording.on_thread(run)
    recording.report()
    whole = {completed.sequence: completed.tokens for completed in recording.completed}
    assert [report.choices for report in recording.reports] == [(NAME,), ((0, 1), NAME)]
    [before] = recording.thread.take_choices(1)
    other, after = recording.thread.take_choices(2)
    assert [len(table) for table in (before, other, after)] == [3 + 4 - 1, 3 + 8 - 1, 4], "prompts have three tokens"
    np.testing.assert_array_equal(other, whole[0, 1].choices)
    np.testing.assert_array_equal(after, whole[NAME].choices[-4:])
    with pytest.raises(KeyError):
        recording.thread.take_choices(2)
    assert not recording.thread._kept


def test_choices_that_the_driver_does_not_claim_are_dropped(recording):
    recording.thread.submit(requests(0))
    recording.until(lambda: len(recording.finished) == 2)
    assert sum(len(tables) for tables in recording.thread._unclaimed.values()) == 2
    for _ in range(rollout_worker.MAX_UNCLAIMED_REPORTS):
        recording.report()
    assert not recording.thread._unclaimed


def test_a_report_contains_what_happened_since_the_one_before(driven):
    driven.thread.submit(requests(0))
    driven.until(lambda: len(driven.finished) == 2)
    report = driven.report()
    assert (dict(report.tokens), dict(report.progress), report.lengths) == ({}, {}, {})
    assert (report.started, report.finished, report.taken, report.loaded) == ({}, {}, (), None)
    assert (report.generated, report.intervals, report.busy) == (0, (), False)
    assert report.steps == driven.reports[-2].steps == 6


def test_new_weights_come_in_between_two_tokens_of_a_running_sequence_and_are_reported(driven):
    weights = {name: tensor.clone() for name, tensor in driven.engine._model.state_dict().items()}

    def load_midway() -> None:
        driven.thread._submit(requests(0, samples=1, tokens=30))
        for _ in range(5):
            driven.thread._step()
        driven.thread.receive(weights, 7)
        driven.thread._commit(7, Future())

    driven.on_thread(load_midway)
    assert driven.thread.has_urgent_report
    driven.until(lambda: bool(driven.finished))
    # The sixth token was drawn already from what the old weights computed.
    assert joined(driven.reports, NAME).versions.tolist() == [0] * 6 + [7] * 24
    assert [report.loaded for report in driven.reports if report.loaded is not None] == [7]


def test_commands_are_carried_out_in_their_order(driven):
    """Each before the next step: a sequence that is submitted, taken and dropped between two steps leaves nothing."""
    weights = {name: tensor.clone() for name, tensor in driven.engine._model.state_dict().items()}
    hold = threading.Event()
    driven.thread._inbox.put(lambda: hold.wait(PATIENCE))
    driven.thread.submit(requests(0))
    driven.thread.take([(0, 0)])
    driven.thread.receive(weights, 3)
    driven.thread.commit(3)
    driven.thread.drop([(0, 1)])
    driven.thread.submit(requests(1, samples=1))
    hold.set()
    driven.until(lambda: bool(driven.finished))
    assert driven.finished == {(1, 0): EndReason.LENGTH}
    assert [name for report in driven.reports for name in report.taken] == [(0, 0)]
    assert joined(driven.reports, (1, 0)).versions.tolist() == [3] * 6


def test_an_engine_that_fails_ends_and_wakes_up_who_waits_for_a_report(driven):
    driven.on_thread(lambda: delattr(driven.engine, "_decoder"))
    driven.woken.clear()
    driven.thread.submit(requests(0))
    assert driven.woken.wait(PATIENCE)
    driven.thread._thread.join(PATIENCE)
    assert not driven.thread._thread.is_alive()
    assert isinstance(driven.thread.failure, AttributeError)
    assert driven.thread.has_urgent_report


def test_a_request_that_is_refused_is_reported_with_its_error_and_the_others_are_generated(driven):
    too_long = SequenceRequest((5, 0), np.array([3, 4, 5], np.int32), 400)
    driven.thread.submit([too_long, *requests(0)])
    driven.until(lambda: len(driven.finished) == 3)
    assert driven.finished == {
        (5, 0): EndReason.ERROR,
        (0, 0): EndReason.LENGTH,
        (0, 1): EndReason.LENGTH,
    }
    [errors] = [report.errors for report in driven.reports if report.errors]
    assert errors.keys() == {(5, 0)}
    assert errors[5, 0].startswith("group 5: prompt 3 + response 400 tokens exceed the engine's 40")
    assert len(joined(driven.reports, (5, 0))) == 0
    assert driven.thread.failure is None
    for table in (driven.thread._reported, driven.thread._unsent, driven.thread._submitted, driven.thread._kept):
        assert not table, "it remembers sequences that it no longer has"


class NotANumber(TorchEngine):
    """From its fifth step on, an engine whose log-probs are not numbers."""

    calls = 0

    def step(self) -> StepOutput:
        self.calls += 1
        if self.calls >= 5:
            self._logits.fill_(math.nan)
        return super().step()


@pytest.mark.parametrize("noticed", ["at its end", "in progress", "when it is taken"])
def test_a_log_prob_that_is_not_a_number_ends_the_engine_and_is_never_reported(noticed, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_worker, "PROGRESS_SECONDS", 0.0 if noticed == "in progress" else 1e6)
    model = build(ModelSettings(MODEL, seed=0, vocabulary=20, max_length=40, base=tmp_path))
    driven = Driven(NotANumber(model, end_token=NEVER, slots=4, max_length=40, seed=1))

    def generate() -> None:
        driven.thread._submit(requests(0, samples=1, tokens=30))
        for _ in range(7 if noticed == "when it is taken" else 30):
            driven.thread._step()
        driven.thread._take([NAME])

    with pytest.raises(NotFiniteLogProbs) as failure:
        driven.on_thread(generate)
    driven.thread.close()
    pattern = r"token \d+ of sequence \(0, 0\) has the log-prob nan with the weights of version 0"
    assert re.fullmatch(pattern, str(failure.value))
    assert reason_of(failure.value) is FailureReason.NOT_FINITE
    report = driven.report()
    assert np.isfinite(joined([report], NAME).log_probs).all()
    assert not report.finished


def test_an_error_outside_of_the_engine_ends_it_and_the_first_error_counts(driven):
    first = RuntimeError("damaged weights")
    driven.thread.fail(first)
    driven.thread.fail(RuntimeError("another"))
    assert driven.woken.wait(PATIENCE)
    driven.thread._thread.join(PATIENCE)
    assert not driven.thread._thread.is_alive()
    assert driven.thread.failure is first


def test_busy_time_is_the_time_that_sequences_ran(driven):
    before = time.time()
    driven.thread.submit(requests(0, samples=4, tokens=30))
    driven.until(lambda: len(driven.finished) == 4)
    intervals = [interval for report in driven.reports for interval in report.intervals]
    assert intervals
    assert all(before <= start <= end <= time.time() for start, end in intervals)
    assert all(first[1] <= second[0] for first, second in pairwise(intervals))


class Building(RolloutWorker):
    """A worker without a process of its own, whose engine is built once its address is known."""

    def __init__(self) -> None:
        self._nodes = ()
        self._changed = asyncio.Event()
        self._calls = WorkerServer({})
        self._listening: asyncio.Task[Endpoint | None] | None = None
        self._opening: asyncio.Task[int | None] | None = None
        self.addressed = threading.Event()
        self.started = 0

    def _start(self) -> Any:
        self.started += 1
        assert self.addressed.wait(30.0), "its address is not answered before its engine is built"
        return Played()

    async def _load_arrived(self) -> None:
        """No weights arrive."""

    def _limiting_room(self, engine: Any) -> int:
        return 7


async def test_a_worker_answers_with_its_address_while_it_builds_its_engine():
    """Both calls are made before its process starts. By the address, the driver knows a replica that loads from a pending one."""
    worker = Building()
    address, opened = asyncio.ensure_future(worker.address()), asyncio.ensure_future(worker.open())
    address.add_done_callback(lambda _: worker.addressed.set())  # as Ray sends the answer
    assert await opened == 7, "the answer is its token room"
    assert (await address).process_id == os.getpid()
    worker._running.close()


async def test_a_worker_builds_one_engine_however_often_it_is_asked_to():
    """The driver repeats a call whose answer was lost."""
    worker = Building()
    worker.addressed.set()
    lost = asyncio.ensure_future(worker.open())
    await asyncio.sleep(0)
    lost.cancel()
    await worker.open()
    running = worker._running
    await worker.open()
    assert worker.started == 1
    assert worker._running is running
    running.close()


# A played engine.


class Played:
    """An engine whose tokens are the numbers of its steps. `hold` stops it within the named method."""

    version = 0

    def __init__(self, hold: str = "") -> None:
        self.hold, self.held, self.free = hold, threading.Event(), threading.Event()
        self.running: dict[SequenceId, tuple[int, list[int]]] = {}  # limit, tokens
        self.lengths: dict[SequenceId, int] = {}
        self.steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[Completed, ...]:
        self._stop_in("submit")
        for request in requests:
            self.running[request.sequence] = (request.max_tokens, request.kept.ids.tolist())
            self.lengths[request.sequence] = len(request.kept)
        return ()

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        return {name: numbers(self.running.pop(name)[1]) for name in sequences if name in self.running}

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        new = {name: tokens[self.lengths[name] :] for name, (_, tokens) in self.running.items()}
        for name, tokens in new.items():
            self.lengths[name] += len(tokens)
        return {name: numbers(tokens) for name, tokens in new.items() if tokens}

    def receive(self, weights: Mapping[str, Any], version: int) -> None:
        self._stop_in("receive")

    def settle(self) -> StepOutput:
        return StepOutput()

    def commit(self, version: int) -> None:
        self._stop_in("commit")

    def step(self) -> StepOutput:
        self._stop_in("step")
        self.steps += 1
        finished = []
        for name, (limit, tokens) in list(self.running.items()):
            tokens.append(self.steps)
            if len(tokens) >= limit:
                finished.append(Completed(name, numbers(tokens), EndReason.LENGTH))
                del self.running[name]
        return StepOutput(tuple(finished))

    def _stop_in(self, method: str) -> None:
        if method == self.hold:
            self.held.set()
            assert self.free.wait(PATIENCE)


def numbers(ids: Sequence[int]) -> GeneratedTokens:
    return GeneratedTokens(np.array(ids, np.int32), np.zeros(len(ids), np.float32), VersionRuns.of([0] * len(ids)))


@pytest.mark.parametrize("method", ["step", "submit", "commit"])
def test_an_engine_that_hangs_is_busy_and_makes_no_step(method):
    """By this the driver notices the hang, wherever it is."""
    engine = Played(method)
    thread = EngineThread(engine, lambda: None)
    if method == "commit":
        thread.commit(1)
    else:
        thread.submit(requests(0))
    assert engine.held.wait(PATIENCE)
    for number in (1, 2):
        report = thread.report(number)
        assert (report.busy, report.steps) == (True, 0)
    engine.free.set()
    thread.close()
    thread._thread.join(PATIENCE)


class Stopped(EngineThread):
    """An engine thread whose methods a test calls in turn, on a clock of its own."""

    def __init__(self, engine: Any, patch: pytest.MonkeyPatch) -> None:
        self.now, self.due = 0.0, 0
        self.set_back = 0.0
        """Seconds by which the wall clock was set back."""
        patch.setattr(rollout_worker, "time", SimpleNamespace(time=self._read_wall_clock, monotonic=lambda: self.now))
        patch.setattr(rollout_worker.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
        super().__init__(engine, self._count_due)

    def _read_wall_clock(self) -> float:
        return self.now - self.set_back

    def _count_due(self) -> None:
        self.due += 1


def play(thread: Stopped, patch: pytest.MonkeyPatch, limits: Mapping[SequenceId, int]) -> None:
    """Submit a sequence of the given number of tokens for each name."""
    prompt = np.array([1], np.int32)
    thread._submit([SequenceRequest(name, prompt, limit) for name, limit in limits.items()])


def test_a_finished_sequence_makes_a_report_due_once_its_group_has_no_other_on_the_replica(monkeypatch):
    thread = Stopped(Played(), monkeypatch)
    others = {(9, index): 1000 for index in range(40)}  # so that few finished sequences are not many
    play(thread, monkeypatch, others | {(0, 0): 1, (0, 1): 2, (0, 2): 4, (1, 0): 3})
    due = []
    for _ in range(4):
        thread._step()
        due.append(thread.due)
    assert due == [0, 0, 1, 2], "for the end of group 1, then for that of group 0"
    assert thread.report(1).finished.keys() == {(0, 0), (0, 1), (0, 2), (1, 0)}


def test_a_report_is_due_when_an_eighth_of_the_sequences_has_finished_whatever_their_groups(monkeypatch):
    """The driver fills their slots before the replica has used up its queue, also when all end at the same time."""
    thread = Stopped(Played(), monkeypatch)
    groups = {(group, index): 1 + index if group < 4 else 99 for group in range(16) for index in range(16)}
    play(thread, monkeypatch, {name: limit for name, limit in groups.items() if name[1] < 15})  # 240
    play(thread, monkeypatch, {(group, 15): 999 for group in range(16)})  # no group ends
    finished = []
    while not thread.due:
        thread._step()
        finished.append(len(thread._outbox.finished))
    assert finished == [4, 8, 12, 16, 20, 24, 28, 32], "of 256"
    thread.report(1)
    thread._step()
    assert thread.due == 1, "those that were reported do not count again"


@pytest.mark.parametrize("length", [80, 800])
def test_sequences_of_any_length_report_in_about_eight_parts_and_a_loss_costs_about_an_eighth(length, monkeypatch):
    thread = Stopped(Played(), monkeypatch)
    thread._duration = float(length)  # as after many sequences of this length; each step takes a second
    play(thread, monkeypatch, {NAME: length, (1, 0): 5 * length})
    parts: dict[SequenceId, list[int]] = {NAME: [], (1, 0): []}
    ended: dict[SequenceId, int] = {}
    for _ in range(5 * length):
        thread.now += 1.0
        thread._step()
        report = thread.report(1)
        for name, tokens in report.progress.items():
            parts[name].append(len(tokens))
        ended |= {name: len(tokens) for name, tokens in report.tokens.items()}
        for name, (_, tokens) in thread._engine.running.items():
            unreported = len(tokens) - sum(parts[name])
            assert unreported <= PROGRESS_SHARE * (length + max(length, len(tokens))) + 2
    assert ended == {NAME: length, (1, 0): 5 * length}
    assert 6 <= len(parts[NAME]) <= 8
    assert len(parts[1, 0]) <= 20, "a sequence of five times the mean has no five times as many parts"


def test_the_longer_sequences_take_the_longer_reports_wait_within_limits(monkeypatch):
    with monkeypatch.context() as patch:
        thread = Stopped(Played(), patch)
    assert (thread.gather_seconds, thread.report_seconds) == (MIN_GATHER_SECONDS, PROGRESS_SECONDS)
    waits = []
    for _ in range(200):
        with monkeypatch.context() as patch:
            patch.setattr(rollout_worker, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: thread.now))
            thread._submit(requests(0, samples=1, tokens=1))
            thread.now += 50.0
            thread._step()
        waits.append((thread.gather_seconds, thread.report_seconds))
    assert waits == sorted(waits), "they grow"
    assert waits[-1] == pytest.approx((50.0 * GATHER_SHARE, 50.0 * PROGRESS_SHARE), rel=0.01)
    thread._duration = 1e6
    assert (thread.gather_seconds, thread.report_seconds) == (MAX_GATHER_SECONDS, MAX_REPORT_SECONDS)


def test_a_wall_clock_that_is_set_back_delays_no_progress_and_leaves_durations_right(monkeypatch):
    class Slow(Played):
        def step(self) -> Any:
            thread.now += 1.5
            return super().step()

    thread = Stopped(Slow(), monkeypatch)
    play(thread, monkeypatch, {NAME: 20, (1, 0): 4})
    progress, intervals = list[int](), list[tuple[float, float]]()
    for _ in range(6):
        thread._step()
        thread.set_back += 600.0
        report = thread.report(1)
        progress.append(NAME in report.progress)
        intervals += report.intervals
    assert progress == [False] + [True] * 5, "from the second that has passed since the start"
    assert [end - start for start, end in intervals] == pytest.approx([1.5] * 6)
    assert thread._duration == pytest.approx(0.1 * 4 * 1.5)


def test_steps_without_a_pause_are_one_interval_also_when_the_wall_clock_is_set(monkeypatch):
    class Slow(Played):
        def step(self) -> Any:
            thread.now += 1.5
            return super().step()

    thread = Stopped(Slow(), monkeypatch)
    play(thread, monkeypatch, {NAME: 20})
    for seconds in (3600.0, -3600.0, 0.0):
        thread._step()
        thread.set_back += seconds
    assert thread.report(1).intervals == ((0.0, 4.5),)


class Ahead(Played):
    """Starts the next step before `step` returns. `settle` or the next `step` returns its output."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[int] = []
        self._output: StepOutput | None = None  # of the step in flight

    def step(self) -> StepOutput:
        output = self._output or super().step()
        self._output = super().step()
        return output

    def settle(self) -> StepOutput:
        output, self._output = self._output or StepOutput(), None
        return output

    def commit(self, version: int) -> None:
        assert self._output is None, "a step is in flight"
        self.commits.append(version)

    def checksums(self) -> dict[str, tuple[int, ...]]:
        return {}


@pytest.mark.parametrize("act", ["take", "commit"])
def test_what_a_step_in_flight_has_ended_is_reported_before_a_command_that_waits_for_it(act, monkeypatch):
    engine = Ahead()
    thread = Stopped(engine, monkeypatch)
    play(thread, monkeypatch, {NAME: 3, (1, 0): 9})
    thread._step()
    thread._step()
    assert not thread.report(1).finished
    if act == "take":
        thread._take([NAME, (1, 0)])
    else:
        thread._commit(7, Future())
    report = thread.report(2)
    assert report.finished == {NAME: EndReason.LENGTH}
    tokens = dict(report.tokens.copies())
    assert tokens[NAME].ids.tolist() == [1, 2, 3]
    if act == "take":
        assert report.taken == ((1, 0),)
        assert tokens[1, 0].ids.tolist() == [1, 2, 3], "the token of the step in flight is among them"
    else:
        assert engine.commits == [7]
    assert (NAME in thread._submitted, thread._reported.keys()) == (False, set() if act == "take" else {(1, 0)})


def test_what_wrong_weights_compute_in_a_step_in_flight_is_not_reported(monkeypatch):
    """The replica is lost afterwards, so its sequences continue elsewhere with the tokens that were reported."""
    engine = Ahead()
    thread = Stopped(engine, monkeypatch)
    play(thread, monkeypatch, {NAME: 3, (1, 0): 9})
    thread._step()
    thread._step()
    thread.report(1)
    thread._load_again({}, 0, Future())
    assert engine.commits == [0]
    report = thread.report(2)
    assert (report.finished, report.generated) == ({}, 0)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3)),
        st.tuples(st.sampled_from(["take", "drop"]), st.integers(0, 3)),
        st.tuples(st.just("step"), st.sampled_from([0.1, 1.5])),
        st.tuples(st.just("report"), st.just(0)),
    ),
    max_size=40,
)


@given(acts=ACTS, share=st.sampled_from([0.0, 0.5]))
def test_the_reports_of_a_sequence_contain_its_tokens_in_order_and_at_its_end_all(acts, share):
    """Also of one that was taken and continues, however its commands and reports lie between steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_worker, "PROGRESS_SHARE", share)
        thread = Stopped(engine := Played(), patch)
        driver: dict[SequenceId, list[int]] = {}  # what the driver has of each sequence
        running, expected = set[SequenceId](), dict[SequenceId, list[int]]()

        def receive() -> None:
            report = thread.report(1)
            for name, tokens in report.progress.items():
                driver[name] = driver[name] + tokens.ids.tolist()
                assert report.lengths[name] == len(driver[name])
            assert sorted(report.tokens) == sorted([*report.finished, *report.taken])
            for name, tokens in report.tokens.items():
                whole = tokens.ids.tolist()
                assert driver[name] == whole[: len(driver[name])], "what was reported before is the beginning"
                driver[name] = expected.pop(name)
                assert whole == driver[name], "all tokens are there when its end is reported"

        for kind, amount in acts:
            name = (int(amount), 0)
            match kind:
                case "submit" if name not in running and name not in expected:
                    kept = driver.setdefault(name, [])
                    prompt = np.array([1], np.int32)
                    thread._submit([SequenceRequest(name, prompt, len(kept) + 5, kept=numbers(kept))])
                    running.add(name)
                case "take" if name in running:
                    expected[name] = list(engine.running[name][1])
                    thread._take([name])
                    running.remove(name)
                case "drop" if name in running:
                    thread._drop([name])
                    running.remove(name)
                    del driver[name]
                case "step" if running:
                    thread.now += amount
                    before = {name: list(tokens) for name, (_, tokens) in engine.running.items()}
                    thread._step()
                    for name in before.keys() - engine.running.keys():
                        expected[name] = [*before[name], engine.steps]
                        running.remove(name)
                case "report":
                    receive()
        receive()
        assert expected == {}
        for name in running:
            tokens = engine.running[name][1]
            assert driver[name] == tokens[: len(driver[name])]


PROBE = Probe((np.array([3, 4, 5], np.int32), np.array([6, 7], np.int32)), np.zeros(3, np.float32), limit=0.1)


def test_a_probe_has_a_result_and_its_step_does_not_count(driven):
    """So that an engine that can compute a probe, and nothing else, has never worked."""
    log_probs = driven.thread.probe(PROBE, 0).result(PATIENCE)
    assert [len(each) for each in log_probs] == [2, 1]
    assert driven.report().steps == 0
    driven.thread.submit(requests(0))
    driven.until(lambda: len(driven.finished) == 2)
    assert driven.report().steps == 6


def test_a_probe_of_another_version_has_no_result(driven):
    assert driven.thread.probe(PROBE, 7).result(PATIENCE) is None
    assert driven.report().probes_dropped == 1
    assert driven.thread.changed_by_loading({}, 7).result(PATIENCE) is None


@pytest.mark.parametrize("ended_by", ["a commit", "another probe", "dropping it"])
def test_a_probe_that_has_not_ended_ends_without_a_result(driven, ended_by):
    driven.thread.hold()
    first = driven.thread.probe(PROBE, 0)
    driven.until(lambda: driven.engine.busy)
    if ended_by == "a commit":
        driven.thread.receive(dict(driven.engine._parameters), 1)
        driven.thread.commit(1)
    elif ended_by == "another probe":
        driven.thread.probe(PROBE, 0)
    else:
        driven.thread.drop_probe()
    assert first.result(PATIENCE) is None
    assert driven.engine.busy == (ended_by == "another probe")
    assert driven.report().probes_dropped == 1
    assert driven.report().probes_dropped == 0


class WaitingProbe:
    """Decodes one sequence in each step that a test makes, while a probe waits, is computed in part, and ends."""

    busy, version = False, 0

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = [{}, {}, {}, {}, {"probing": True}, {"probed": (np.zeros(2, np.float32),)}]

    def probe(self, sequences: object) -> None:
        pass

    def step(self) -> StepOutput:
        return StepOutput(tokens=1, **self.steps.pop(0))


def test_steps_are_measured_while_a_probe_waits_and_not_while_it_is_computed():
    engine: Any = WaitingProbe()
    thread, probing = EngineThread(engine, lambda: None), Future[Any]()
    thread._probe(PROBE, 0, probing)
    while engine.steps:
        thread._step()
    thread.close()
    assert probing.done()
    [decoding] = thread.report(1).measured.decode
    assert decoding.steps == 3, "the first step of its kind does not count"


def test_an_engine_that_is_held_makes_no_step_and_carries_out_commands(driven):
    driven.thread.hold()
    driven.thread.submit(requests(0))
    driven.on_thread(lambda: None)
    assert driven.thread.changed_by_loading(dict(driven.engine._parameters), 0).result(PATIENCE) == []
    report = driven.report()
    assert (report.steps, report.busy) == (0, True)


class Probing(RolloutWorker):
    """A worker without a process of its own."""

    def __init__(self, engine: Any) -> None:
        self._spec: Any = SimpleNamespace(publication=SimpleNamespace(timeoutSeconds=0.05))
        self._engine = EngineThread(engine, lambda: None)
        self._probes, self._replacing = set(), asyncio.Lock()


async def test_a_probe_that_finds_no_slot_is_dropped_and_the_replica_stays(driven, caplog):
    driven.thread.close()
    worker = Probing(driven.engine)
    worker._running.hold()  # as if all slots were taken for long
    manifest = WeightManifest(0, WeightLayout((), 0), ())
    worker._begin_probe(PublishedWeights(manifest, StoredBuckets((), changes_follow=False)), PROBE)
    await asyncio.gather(*worker._probes)
    worker._running._inbox.put(worker._running.close)
    worker._running._thread.join(PATIENCE)
    assert not driven.engine.busy
    assert worker._running.failure is None
    assert "version 0 was not compared with the trainer: its probe took more than 0.05 s" in caplog.text


def test_a_thread_whose_engine_sleeps_makes_no_step_until_a_version_is_committed():
    """Sequences that it had are dropped: the run is over when the pools change sides with sequences under way."""
    calls: list[str] = []
    engine = SimpleNamespace(busy=True, version=3)
    for name in ("submit", "take", "probe", "commit"):
        setattr(engine, name, lambda *_, name=name: calls.append(name))
    engine.sleep = lambda: (calls.append("sleep"), MemoryChange(10, 1))[1]
    engine.wake = lambda: calls.append("wake")
    engine.settle = lambda: (calls.append("settle"), StepOutput())[1]
    engine.step = lambda: (calls.append("step"), StepOutput(tokens=1))[1]
    engine.progress = dict
    thread = EngineThread(engine, lambda: None)
    try:
        thread.submit([SequenceRequest(NAME, np.array([3], np.int32), 8)])
        thread.sleep().result(PATIENCE)
        asleep = thread.report(1)
        assert (asleep.slept, asleep.busy) == (MemoryChange(10, 1), False)
        thread.wake().result(PATIENCE)
        assert thread.report(2).woken
        thread.commit(4).result(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while calls[-1] != "step":
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        thread.close()
    turned = calls[calls.index("probe") :]
    assert turned[: turned.index("step")] == ["probe", "take", "sleep", "wake", "settle", "commit"]
