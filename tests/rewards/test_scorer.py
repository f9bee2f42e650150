import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data import Prompt
from qwen35_trainer.manifest.rewards import OnError, RewardSpec
from qwen35_trainer.rewards.exact_match import ExactMatch
from qwen35_trainer.rewards.failures import Failures
from qwen35_trainer.rewards.reward import Response, RewardError, RewardFailed, RewardSetupError, Score
from qwen35_trainer.rewards.scorer import ConfiguredReward, Scorer, combine
from qwen35_trainer.rewards.scorer_builder import needs_answers

COMPLETION = Response(Prompt("s/0", "s", "question"), "text", 1, truncated=False)
ERROR = Score(None, "KeyError: 'x'", 0.0)


def part(name: str, weight: float = 1.0, on_error: str = "Zero") -> ConfiguredReward:
    return ConfiguredReward(ExactMatch(name, weight, None), on_error)


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=5))
def test_the_value_is_the_weighted_sum(pairs: list[tuple[float, float]]) -> None:
    parts = [part(str(index), weight) for index, (weight, _) in enumerate(pairs)]
    scored = combine(COMPLETION, parts, [Score(value, None, 0.0) for _, value in pairs])
    assert scored.value == pytest.approx(sum(weight * value for weight, value in pairs))
    assert scored.parts == {str(index): value for index, (_, value) in enumerate(pairs)}
    assert not scored.errors


def test_zero_counts_a_failed_reward_as_nothing() -> None:
    scored = combine(COMPLETION, [part("a"), part("b", 2.0)], [ERROR, Score(3.0, None, 0.0)])
    assert (scored.value, scored.parts, scored.errors) == (6.0, {"a": 0.0, "b": 3.0}, {"a": "KeyError: 'x'"})


def test_an_error_loses_what_logs_and_terminals_cannot_take() -> None:
    error = RewardError("one\ttwo\nthree \x1b[31m \ud800 ü", details="\x07")
    assert (str(error), error.details) == ("one\ttwo\nthree \\x1b[31m \\ud800 ü", "\\x07")


def test_skip_leaves_the_sample_out_and_keeps_the_other_scores() -> None:
    scored = combine(COMPLETION, [part("a", on_error="Skip"), part("b")], [ERROR, Score(3.0, None, 0.0)])
    assert (scored.value, scored.parts, scored.errors) == (None, {"b": 3.0}, {"a": "KeyError: 'x'"})


def test_fail_ends_the_run_with_reward_prompt_and_reason() -> None:
    with pytest.raises(RewardFailed, match="reward a, onError Fail, prompt s/0: KeyError: 'x'"):
        combine(COMPLETION, [part("a", on_error="Fail")], [ERROR])


@dataclass
class Sometimes:
    """A reward that fails for every text but "good"."""

    name: str = "sometimes"
    weight: float = 1.0

    async def score(self, response: Response) -> float:
        if response.text != "good":
            raise RewardError(f"no score for {response.text}", kind="KeyError")
        return 1.0

    def close(self) -> None:
        """Nothing to close."""


async def scored(scorer: Scorer, *texts: str) -> None:
    for text in texts:
        await scorer.score(Response(COMPLETION.prompt, text, 1, truncated=False))


@pytest.mark.parametrize("on_error", ["Zero", "Skip"])
async def test_a_trial_in_which_every_reward_fails_ends_the_run_with_the_first_reason(on_error: OnError) -> None:
    scorer = Scorer([ConfiguredReward(Sometimes(), on_error), ConfiguredReward(Sometimes("other"), on_error)], trial=3)
    await scored(scorer, "a", "b")
    with pytest.raises(RewardFailed) as raised:
        await scored(scorer, "c")
    assert str(raised.value) == (
        "every reward of the first 3 responses failed, so that there is nothing to learn from. "
        "The first one: reward sometimes, prompt s/0: KeyError: no score for a"
    )


async def test_one_score_of_one_reward_passes_the_trial() -> None:
    class Never(Sometimes):
        async def score(self, response: Response) -> float:
            raise RewardError("never")

    scorer = Scorer([ConfiguredReward(Never("never"), "Zero"), ConfiguredReward(Sometimes(), "Zero")], trial=3)
    await scored(scorer, "a", "good", *"bcdefg")


async def test_rewards_that_fail_after_the_trial_do_not_end_the_run() -> None:
    await scored(Scorer([ConfiguredReward(Sometimes(), "Zero")], trial=1), "good", *"abc")


def test_failures_are_counted_by_reward_with_time_outs_apart_and_the_first_in_words() -> None:
    late, parts = Score(None, "Timeout: too slow", 0.0, timed_out=True), [part("a"), part("b", on_error="Skip")]
    failures = Failures()
    for prompt, scores in (("s/0", [Score(1.0, None, 0.0)] * 2), ("s/1", [ERROR, late]), ("s/2", [late, late])):
        failures.add(prompt, combine(COMPLETION, parts, scores))
    assert (failures.errors, failures.timeouts, failures.total()) == ({"a": 1}, {"a": 1, "b": 2}, 4)
    assert failures.first == "reward a, prompt s/1: KeyError: 'x'"


def test_the_words_of_the_first_failure_are_bounded() -> None:
    failures = Failures()
    failures.add("s/1", combine(COMPLETION, [part("a")], [Score(None, "x" * 10_000, 0.0)]))
    assert len(failures.first) == 500


async def test_a_completion_outside_the_trial_neither_passes_nor_fails_it() -> None:
    scorer = Scorer([ConfiguredReward(Sometimes(), "Zero")], trial=1)
    for text in ("bad", "good"):
        await scorer.score(Response(COMPLETION.prompt, text, 1, truncated=False), in_trial=False)
    with pytest.raises(RewardFailed, match="every reward of the first 1 responses failed"):
        await scored(scorer, "bad")


async def test_without_a_trial_nothing_has_to_be_scored() -> None:
    await scored(Scorer([ConfiguredReward(Sometimes(), "Zero")]), *"abc")


async def test_only_the_first_error_of_a_kind_is_logged_with_its_traceback(
    build, complete, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "raising.py").write_text("def f(prompt, response, answer, metadata):\n    return {}[response]\n")
    scorer = build({"type": "Function", "function": "raising:f"})
    with caplog.at_level(logging.WARNING):
        for text in ("first", "second"):
            assert (await scorer.score(complete(text))).value == 0.0
    [record] = caplog.records
    assert "reward Function failed on prompt s/0: KeyError: 'first'" in record.getMessage()
    assert 'raising.py", line 2, in f' in record.getMessage()


def test_a_scorer_serves_one_event_loop_after_another(build, complete) -> None:
    scorer = build({"type": "ExactMatch", "extract": r"\d+"})
    assert [asyncio.run(scorer.score(complete(text, "42"))).value for text in ("is 42", "is 41")] == [1.0, 0.0]


def test_rewards_without_a_name_are_called_by_their_type_and_number(build) -> None:
    named = {"type": "ExactMatch", "name": "mine"}
    scorer = build({"type": "ExactMatch"}, named, {"type": "ExactMatch"})
    assert [part.reward.name for part in scorer.parts] == ["ExactMatch-1", "mine", "ExactMatch-2"]
    assert [part.reward.name for part in build({"type": "ExactMatch"}, named).parts] == ["ExactMatch", "mine"]


def test_two_rewards_of_one_name_are_refused(build) -> None:
    with pytest.raises(RewardSetupError, match="two rewards are named ExactMatch"):
        build({"type": "ExactMatch"}, {"type": "Math", "name": "ExactMatch"})


@pytest.mark.parametrize(("kind", "needs"), [("Math", True), ("ExactMatch", True), ("Gym", False), ("Function", False)])
def test_answers_are_needed_by_the_rewards_that_compare(kind: str, needs: bool) -> None:
    assert needs_answers([RewardSpec.model_validate({"type": kind})]) is needs
