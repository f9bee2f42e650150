"""The thread around a real engine with a tiny model: nothing is lost between it and its callers."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5.build_model import build
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, RolloutEngine, SequenceRequest
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.runtime import rollout_worker
from qwen35_trainer.runtime.rollout_worker import Collected, EngineThread
from tests.patience import PATIENCE

NEVER = 99
"""An end token outside the vocabulary: every sequence is as long as its limit."""
MODEL = ModelSpec.model_validate(
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
        assert answered.wait(PATIENCE), "the thread did not answer"
        return errors[0]

    def until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not enough():
            assert time.monotonic() < deadline, "the engine came to no end"
            self.news.wait(0.05)
            self.news.clear()
            self.collected.append(self.thread.drain())

    @property
    def finished(self) -> list[Completed]:
        return [completed for collected in self.collected for completed in collected.finished]


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    model = build(MODEL, seed=0, vocabulary=20, max_length=40, base=tmp_path)
    built = Driven(TorchEngine(model, end_token=NEVER, slots=4, max_length=40, seed=1))
    yield built
    built.thread.close()


def requests(group: int, *, samples: int = 2, tokens: int = 6) -> list[SequenceRequest]:
    return [SequenceRequest((group, index), (3, 4, 5), tokens) for index in range(samples)]


@pytest.fixture
def reporting(monkeypatch) -> None:
    """Unfinished sequences report their tokens at every step."""
    monkeypatch.setattr(rollout_worker, "PROGRESS_SECONDS", 0.0)


def test_every_sequence_comes_out_once_and_its_start_is_reported(driven):
    groups = [requests(group) for group in range(9)]
    for first in (0, 3, 6):
        several = [request for group in groups[first : first + 3] for request in group]
        assert driven.do(lambda engine, several=several: engine.submit(several)) is None
    driven.until(lambda: len(driven.finished) == 18)
    names = [(group, index) for group in range(9) for index in range(2)]
    assert sorted(completed.sequence for completed in driven.finished) == names
    generated = sum(len(completed.tokens) for completed in driven.finished)
    assert sum(collected.tokens for collected in driven.collected) == generated
    started = [pair for collected in driven.collected for pair in collected.started.items()]
    assert sorted(started) == [(name, 0) for name in names]


def test_unfinished_sequences_report_their_tokens_now_and_then(driven, reporting):
    driven.do(lambda engine: engine.submit([*requests(0, samples=1, tokens=30), *requests(1, samples=6, tokens=8)]))
    driven.until(lambda: len(driven.finished) == 7)
    for completed in driven.finished:
        parts = [part for collected in driven.collected for part in collected.progress.get(completed.sequence, ())]
        reported = GeneratedTokens.join(parts)
        # All but the one that ended it, which comes with the whole.
        assert len(reported) == len(completed.tokens) - 1
        assert reported.ids.tolist() == completed.tokens.ids[:-1].tolist()
        assert reported.log_probs.tolist() == completed.tokens.log_probs[:-1].tolist()


def test_what_a_taken_sequence_has_reported_is_not_reported_again(driven, reporting):
    """It continues with all its tokens: reported once more when it comes back, they would count twice."""

    def step_and_take(engine: RolloutEngine) -> None:
        engine.submit(requests(0, tokens=30))
        driven.thread._step()  # in this call, so that the second step does not come before the taking
        driven.thread.forget(engine.take([(0, 0)]))

    assert driven.do(step_and_take) is None
    driven.until(lambda: len(driven.finished) == 1)
    assert {name for collected in driven.collected for name in collected.progress} == {(0, 1)}


def test_draining_empties_the_outbox(driven):
    driven.do(lambda engine: engine.submit(requests(0)))
    driven.until(lambda: len(driven.finished) == 2)
    assert driven.thread.drain() == Collected()


def test_a_call_that_fails_raises_at_its_caller_and_the_engine_continues(driven):
    error = driven.do(lambda engine: engine.submit(requests(0, tokens=400)))
    assert isinstance(error, ValueError)
    assert "prompt 3 + response 400 tokens exceed the engine's 40" in str(error)
    assert driven.do(lambda engine: engine.submit(requests(1))) is None
    driven.until(lambda: bool(driven.finished))
    assert driven.thread.failure is None


def test_new_weights_come_in_between_two_tokens_of_a_running_sequence(driven):
    weights = {name: tensor.clone() for name, tensor in driven.engine._model.state_dict().items()}

    def load_midway(engine: RolloutEngine) -> None:
        engine.submit(requests(0, samples=1, tokens=30))
        for _ in range(5):
            engine.step()
        engine.load(weights, 7)

    assert driven.do(load_midway) is None
    driven.until(lambda: bool(driven.finished))
    # The sixth token was drawn already from what the old weights computed.
    assert driven.finished[0].tokens.versions.tolist() == [0] * 6 + [7] * 24


def test_a_taken_sequence_never_comes_out_and_its_tokens_move_with_it(driven):
    taken: dict[tuple[int, int], GeneratedTokens] = {}

    def take_midway(engine: RolloutEngine) -> None:
        engine.submit([*requests(0, samples=2, tokens=30), *requests(1)])
        engine.step()
        taken.update(engine.take([(0, 0), (0, 1), (5, 5)]))

    assert driven.do(take_midway) is None
    driven.until(lambda: not driven.engine.busy)
    driven.collected.append(driven.thread.drain())
    assert sorted(completed.sequence for completed in driven.finished) == [(1, 0), (1, 1)]
    assert {name: len(tokens) for name, tokens in taken.items()} == {(0, 0): 1, (0, 1): 1}


def test_a_dead_engine_is_reported_and_wakes_the_collector(driven):
    def break_it(engine: RolloutEngine) -> None:
        del engine._decoder

    driven.do(break_it)
    driven.news.clear()
    driven.do(lambda engine: engine.submit(requests(0)))
    assert driven.news.wait(PATIENCE)
    assert isinstance(driven.thread.failure, AttributeError)


def test_busy_time_is_the_time_that_sequences_ran(driven):
    before = time.time()
    driven.do(lambda engine: engine.submit(requests(0, samples=4, tokens=30)))
    driven.until(lambda: len(driven.finished) == 4)
    intervals = [interval for collected in driven.collected for interval in collected.busy]
    assert intervals
    assert all(before <= start <= end <= time.time() for start, end in intervals)
    assert all(first[1] <= second[0] for first, second in pairwise(intervals))
