"""The laws of rollout engines, on the Torch engine, and engines that break one each. `test_vllm.py` runs the same suite on vLLM."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout import torch as rollout_torch
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, Sampling, SequenceRequest, StepOutput
from qwen35_trainer.rollout.sampling import DrawnTokens
from qwen35_trainer.rollout.sampling import sample as draw
from qwen35_trainer.rollout.torch import TorchEngine
from tests.profiles import ORDER, SOAK
from tests.rollout.laws import LawBroken, Replay, UnderTest, check_histories, check_versions

END, MAX_LENGTH = 2, 96
HISTORIES = 1000 if SOAK else 150
FIRST_HISTORY = 10_000 * int(ORDER or 0)
"""The histories of `make test` are always the same, those of `make soak` follow its seed. Engines are killed in them."""


@pytest.fixture
def models(make_model: Callable[..., Any]) -> dict[int, Any]:
    return {seed: make_model(seed=seed) for seed in (0, 1)}


def under_test(
    kind: type[TorchEngine], make_model: Callable[..., Any], models: dict[int, Any], slots: int = 4
) -> UnderTest:
    """An engine with the weights of seed 0 as version 1."""
    engine = kind(make_model(), end_token=END, slots=slots, max_length=MAX_LENGTH, seed=0)
    built = UnderTest(
        engine,
        models,
        Replay(models, MAX_LENGTH),
        end_token=END,
        vocabulary=models[0].config.vocab_size,
        max_length=MAX_LENGTH,
        computes_ahead=1,
        mean_difference=1e-4,
        history_difference=1e-4,
        near_tie=1e-4,
        samplings=(
            Sampling(),
            Sampling(0.7),
            Sampling(0.0),
            Sampling(stop=(5, 6)),
            Sampling(1.3, top_k=4),
            Sampling(0.7, top_p=0.75, top_k=20),
        ),
    )
    built.load(0)
    return built


def test_random_histories_keep_the_laws(make_model, models) -> None:
    test = under_test(TorchEngine, make_model, models)
    test.restart = lambda: TorchEngine(make_model(), end_token=END, slots=4, max_length=MAX_LENGTH, seed=0)
    completed = check_histories(test, range(FIRST_HISTORY, FIRST_HISTORY + HISTORIES))
    assert completed > 3 * HISTORIES, "the histories test something"


def test_a_sequence_that_spans_three_versions_has_the_log_probs_of_its_replay(make_model, models) -> None:
    check_versions(under_test(TorchEngine, make_model, models, slots=12))


# Engines with one defect each.


class VersionOfNow(TorchEngine):
    """Gives a token the version in service when it is drawn, not that of the weights that computed its logits."""

    def step(self) -> StepOutput:
        self._logits_version.fill_(self._version)
        return super().step()


class StartsWithTheNext(TorchEngine):
    """Reports the start of a sequence with a version that is not in service yet."""

    def step(self) -> StepOutput:
        output = super().step()
        return dataclasses.replace(output, started={name: version + 1 for name, version in output.started.items()})


class ReportsTaken(TorchEngine):
    """Reports a token of a sequence that was taken and has not returned."""

    taken: ClassVar[dict[SequenceId, GeneratedTokens]] = {}

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        self.taken = super().take(sequences)
        return self.taken

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        held = {each.sequence for each in (*self._running, *self._waiting)}
        late = {name: tokens[-1:] for name, tokens in self.taken.items() if name not in held and len(tokens)}
        return super().progress() | late


class CommitsHalf(TorchEngine):
    """Replaces every other parameter."""

    def commit(self, version: int) -> None:
        before = {name: parameter.data for name, parameter in list(self._parameters.items())[::2]}
        super().commit(version)
        for name, tensor in before.items():
            self._parameters[name].data = tensor


class InServiceWhenReceived(TorchEngine):
    """Puts a version in service before its commit."""

    def receive(self, weights: Any, version: int) -> None:
        super().receive(weights, version)
        received = self._received
        self.commit(version)
        self._received = received


class ReportsAgain(TorchEngine):
    """Reports a token again after its slot has moved."""

    def _free(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        moves = super()._free(slots)
        for _, target in moves:
            self._reported[target] = (self._reported[target] - 1).clamp(min=0)
        return moves


class ForgetsTheLastKeptToken(TorchEngine):
    """Continues from all kept tokens but the last."""

    def _admit(self) -> dict[SequenceId, int]:
        continued = [[*each.prompt.tolist(), *each.kept.ids.tolist()] for each in self._waiting if len(each.kept)]
        prefill = self._decoder.prefill

        def shortened(prompts: Sequence[Sequence[int]], *arguments: Any) -> torch.Tensor:
            return prefill([prompt[:-1] if prompt in continued else prompt for prompt in prompts], *arguments)

        with mock.patch.object(self._decoder, "prefill", shortened):
            return super()._admit()


class SecondBest(TorchEngine):
    """At temperature 0, takes the second most likely token with its own log-prob."""

    def step(self) -> StepOutput:
        draw = rollout_torch.sample

        def wrong(logits: torch.Tensor, temperature: torch.Tensor, *others: Any) -> tuple[Any, ...]:
            tokens, log_probs, *more = draw(logits, temperature, *others)
            second = logits.topk(2).indices[:, 1]
            of_second = logits.log_softmax(-1).gather(1, second.unsqueeze(1)).squeeze(1)
            greedy = temperature == 0
            return torch.where(greedy, second, tokens), torch.where(greedy, of_second, log_probs), *more

        with mock.patch.object(rollout_torch, "sample", wrong):
            return super().step()


class LogProbsAtTemperature1(TorchEngine):
    """Draws at the temperature of the request, and returns log-probs at temperature 1."""

    def step(self) -> StepOutput:
        draw = rollout_torch.sample

        def wrong(logits: torch.Tensor, *others: Any) -> tuple[Any, ...]:
            tokens, _, *more = draw(logits, *others)
            return tokens, logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1), *more

        with mock.patch.object(rollout_torch, "sample", wrong):
            return super().step()


class LeavesCandidatesBehind(TorchEngine):
    """Moves a sequence to another slot without the candidates of its tokens."""

    def _free(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        with mock.patch.object(self._candidates, "move"):
            return super()._free(slots)


class RaisesForOne(TorchEngine):
    """Raises because of one sequence of a call."""

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[Completed, ...]:
        for request in requests:
            if problem := self._limits.problem(request):
                raise ValueError(problem)
        return super().submit(requests)


class LosesOne(TorchEngine):
    """Drops a sequence that waits when another one is submitted."""

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[Completed, ...]:
        if len(self._waiting) > 1:
            self._waiting.popleft()
        return super().submit(requests)


class EndsLate(TorchEngine):
    """Ignores the stop tokens of requests."""

    def _set_stop_tokens(self, slots: slice, admitted: Sequence[SequenceRequest]) -> None:
        self._stop[slots, 0] = self._end_token


class NarrowsTheNucleus(TorchEngine):
    """Draws from the tokens of top-p, and reports only two of them, with the log-prob over these."""

    def step(self) -> StepOutput:
        def narrowed(logits: Tensor, temperature: Tensor, top_p: Tensor, *others: Tensor) -> DrawnTokens:
            drawn = draw(logits, temperature, top_p, *others)
            if drawn.kept is None:
                return drawn
            two = torch.zeros_like(drawn.kept)
            rows = torch.arange(len(logits))
            two[rows, drawn.ids] = two[rows, logits.argmax(-1)] = True
            kept = torch.where((top_p < 1).unsqueeze(1), two, drawn.kept)
            scaled = logits / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1)
            over_kept = scaled.masked_fill(~kept, float("-inf")).log_softmax(-1).gather(1, drawn.ids[:, None])[:, 0]
            return DrawnTokens(drawn.ids, torch.where(top_p < 1, over_kept, drawn.log_probs), kept)

        with mock.patch.object(rollout_torch, "sample", narrowed):
            return super().step()


class IgnoresTopP(TorchEngine):
    """Keeps all tokens of top-k."""

    def step(self) -> StepOutput:
        def whole(logits: Tensor, temperature: Tensor, top_p: Tensor, *others: Tensor) -> DrawnTokens:
            return draw(logits, temperature, torch.ones_like(top_p), *others)

        with mock.patch.object(rollout_torch, "sample", whole):
            return super().step()


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (StartsWithTheNext, 1),
        (VersionOfNow, 6),
        (ReportsTaken, 2),
        (InServiceWhenReceived, 3),
        (CommitsHalf, 6),
        (ReportsAgain, 4),
        (SecondBest, 5),
        (ForgetsTheLastKeptToken, 6),
        (LogProbsAtTemperature1, 6),
        (LeavesCandidatesBehind, 4),
        (NarrowsTheNucleus, 6),
        (IgnoresTopP, 6),
        (RaisesForOne, 7),
        (LosesOne, 8),
        (EndsLate, 8),
    ],
)
def test_an_engine_that_breaks_a_law_is_found(kind: type[TorchEngine], law: int, make_model, models) -> None:
    """Wrong versions, wrong states and mixtures of weights are found by their log-probs, which is law 6."""
    test = under_test(kind, make_model, models)
    with pytest.raises(LawBroken, match=f"^law {law}:"):
        check_histories(test, range(200))
