"""The thread around a real engine with a tiny model: nothing is lost between it and its callers."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from qwen35_trainer.models.qwen3_5.build import build
from qwen35_trainer.rollout.base import GroupRequest, GroupResult, RolloutEngine
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.runtime.rollout_worker import Collected, EngineThread
from qwen35_trainer.spec import Model

DEADLINE = 60.0
NEVER = 99
"""An end token outside the vocabulary: every sequence is as long as its limit."""
MODEL = Model.model_validate(
    {"name": "tiny", "precision": "FP32"}
    | {"source": {"random": {"hiddenSize": 16, "intermediateSize": 16, "layers": 2, "fullAttentionInterval": 2}}}
)


class Driven:
    """An engine thread, and what it brought so far."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.news = threading.Event()
        self.thread = EngineThread(engine, self.news.set)
        self.collected: list[Collected] = []

    def do(self, act: Callable[[RolloutEngine], None]) -> BaseException | None:
        """Have `act` done, and return what it raised."""
        answered = threading.Event()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            answered.set()

        self.thread.call(act, done)
        assert answered.wait(DEADLINE), "the thread did not answer"
        return errors[0]

    def until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not enough():
            assert time.monotonic() < deadline, "the engine came to no end"
            self.news.wait(0.05)
            self.news.clear()
            self.collected.append(self.thread.drain())

    @property
    def finished(self) -> list[GroupResult]:
        return [result for collected in self.collected for result in collected.finished]


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    model = build(MODEL, seed=0, vocabulary=20, max_length=40, base=tmp_path)
    built = Driven(TorchEngine(model, end_token=NEVER, slots=4, max_length=40, seed=1))
    yield built
    built.thread.close()


def request(group: int, *, samples: int = 2, tokens: int = 6) -> GroupRequest:
    return GroupRequest(group, (3, 4, 5), samples, tokens)


def test_every_group_comes_out_once_with_all_its_samples(driven):
    for first in (0, 3, 6):
        assert driven.do(lambda engine, first=first: engine.submit([request(first + n) for n in range(3)])) is None
    driven.until(lambda: len(driven.finished) == 9)
    assert sorted(result.group for result in driven.finished) == list(range(9))
    assert {len(result.sequences) for result in driven.finished} == {2}
    generated = sum(len(sequence.tokens) for result in driven.finished for sequence in result.sequences)
    assert sum(collected.tokens for collected in driven.collected) == generated
    assert {
        group: version for collected in driven.collected for group, version in collected.born.items()
    } == dict.fromkeys(range(9), 0)


def test_draining_empties_the_outbox(driven):
    driven.do(lambda engine: engine.submit([request(0)]))
    driven.until(lambda: bool(driven.finished))
    assert driven.thread.drain() == Collected((), {}, 0, ())


def test_a_call_that_fails_tells_its_caller_and_the_engine_goes_on(driven):
    error = driven.do(lambda engine: engine.submit([request(0, tokens=400)]))
    assert isinstance(error, ValueError)
    assert "prompt 3 + response 400 tokens exceed the engine's 40" in str(error)
    assert driven.do(lambda engine: engine.submit([request(1)])) is None
    driven.until(lambda: bool(driven.finished))
    assert driven.thread.failure is None


def test_new_weights_come_in_between_two_tokens_of_a_running_sequence(driven):
    weights = {name: tensor.clone() for name, tensor in driven.engine._model.state_dict().items()}

    def load_midway(engine: RolloutEngine) -> None:
        engine.submit([request(0, samples=1, tokens=30)])
        for _ in range(5):
            engine.step()
        engine.load(weights, 7)

    assert driven.do(load_midway) is None
    driven.until(lambda: bool(driven.finished))
    # The sixth token was drawn already from what the old weights computed.
    assert driven.finished[0].sequences[0].versions.tolist() == [0] * 6 + [7] * 24


def test_a_cancelled_group_never_comes_out(driven):
    def cancel_midway(engine: RolloutEngine) -> None:
        engine.submit([request(0, tokens=30), request(1)])
        engine.step()
        engine.cancel([0])

    assert driven.do(cancel_midway) is None
    driven.until(lambda: not driven.engine.busy)
    driven.collected.append(driven.thread.drain())
    assert [result.group for result in driven.finished] == [1]


def test_a_dead_engine_is_reported_and_wakes_the_collector(driven):
    def break_it(engine: RolloutEngine) -> None:
        del engine._decoder

    driven.do(break_it)
    driven.news.clear()
    driven.do(lambda engine: engine.submit([request(0)]))
    assert driven.news.wait(DEADLINE)
    assert isinstance(driven.thread.failure, AttributeError)


def test_busy_time_is_the_time_that_sequences_ran(driven):
    before = time.time()
    driven.do(lambda engine: engine.submit([request(0, samples=4, tokens=30)]))
    driven.until(lambda: len(driven.finished) == 1)
    intervals = [interval for collected in driven.collected for interval in collected.busy]
    assert intervals
    assert all(before <= start <= end <= time.time() for start, end in intervals)
    assert all(first[1] <= second[0] for first, second in pairwise(intervals))
