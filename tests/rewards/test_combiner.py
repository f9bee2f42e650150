import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.manifest.rewards import OnError, RewardSpec
from qwen35_trainer.rewards.combiner import Combiner, Failures, combine
from qwen35_trainer.rewards.reward import (
    GENERATION,
    CombinedScore,
    RewardError,
    RewardFailed,
    RewardSetupError,
    Score,
)
from qwen35_trainer.rewards.reward_settings import RewardTerm, needs_answers

PROMPT = "s/0"
GOOD = Score(1.0)
ERROR = Score(None, "KeyError: 'x'", details="Traceback: KeyError: 'x'")


def term(name: str, weight: float = 1.0, on_error: OnError = "Zero") -> RewardTerm:
    return RewardTerm(name, weight, on_error)


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=5))
def test_the_value_is_the_weighted_sum(pairs: list[tuple[float, float]]) -> None:
    terms = [term(str(index), weight) for index, (weight, _) in enumerate(pairs)]
    scored = combine(PROMPT, terms, [Score(value) for _, value in pairs])
    assert scored.value == pytest.approx(sum(weight * value for weight, value in pairs))
    assert scored.parts == {str(index): value for index, (_, value) in enumerate(pairs)}
    assert not scored.errors


def test_zero_counts_a_failed_reward_as_nothing() -> None:
    scored = combine(PROMPT, [term("a"), term("b", 2.0)], [ERROR, Score(3.0)])
    assert (scored.value, scored.parts, scored.errors) == (6.0, {"a": 0.0, "b": 3.0}, {"a": "KeyError: 'x'"})


def test_an_error_loses_what_logs_and_terminals_cannot_take() -> None:
    error = RewardError("one\ttwo\nthree \x1b[31m \ud800 ü", details="\x07")
    assert (str(error), error.details) == ("one\ttwo\nthree \\x1b[31m \\ud800 ü", "\\x07")


def test_skip_leaves_the_sample_out_and_keeps_the_other_scores() -> None:
    scored = combine(PROMPT, [term("a", on_error="Skip"), term("b")], [ERROR, Score(3.0)])
    assert (scored.value, scored.parts, scored.errors) == (None, {"b": 3.0}, {"a": "KeyError: 'x'"})


def test_rewards_that_lower_the_sum_or_only_observe_are_penalties() -> None:
    terms = [term("Math"), term("repeats", weight=-0.5), term("observed", weight=0.0)]
    scored = combine(PROMPT, terms, [Score(1.0), Score(1.0), Score(0.0)])
    assert (scored.value, scored.penalties) == (0.5, {"repeats", "observed"})


def test_fail_ends_the_run_with_reward_prompt_and_reason() -> None:
    with pytest.raises(RewardFailed, match="reward a, onError Fail, prompt s/0: KeyError: 'x'"):
        combine(PROMPT, [term("a", on_error="Fail")], [ERROR])


def failed(text: str) -> Score:
    return Score(None, f"KeyError: no score for {text}")


@pytest.mark.parametrize("on_error", ["Zero", "Skip"])
def test_a_trial_in_which_every_reward_fails_ends_the_run_with_the_first_reason(on_error: OnError) -> None:
    combiner = Combiner([term("sometimes", on_error=on_error), term("other", on_error=on_error)], trial=3)
    for text in "ab":
        combiner.combined(PROMPT, [failed(text)] * 2)
    with pytest.raises(RewardFailed) as raised:
        combiner.combined(PROMPT, [failed("c")] * 2)
    assert str(raised.value) == (
        "every reward of the first 3 responses failed, so that there is nothing to learn from. "
        "The first one: reward sometimes, prompt s/0: KeyError: no score for a"
    )


def test_one_score_of_one_reward_passes_the_trial() -> None:
    combiner = Combiner([term("never"), term("sometimes")], trial=3)
    for score in (ERROR, GOOD, *[ERROR] * 6):
        combiner.combined(PROMPT, [ERROR, score])


def test_rewards_that_fail_after_the_trial_do_not_end_the_run() -> None:
    combiner = Combiner([term("sometimes")], trial=1)
    for score in (GOOD, *[ERROR] * 3):
        combiner.combined(PROMPT, [score])


def test_failures_are_counted_by_reward_with_time_outs_apart_and_the_first_in_words() -> None:
    late, terms = Score(None, "Timeout: too slow", timed_out=True), [term("a"), term("b", on_error="Skip")]
    failures = Failures()
    for prompt, scores in (("s/0", [Score(1.0)] * 2), ("s/1", [ERROR, late]), ("s/2", [late, late])):
        failures.add(prompt, combine(PROMPT, terms, scores))
    assert (failures.errors, failures.timeouts, failures.total()) == ({"a": 1}, {"a": 1, "b": 2}, 4)
    assert failures.first == "reward a, prompt s/1: KeyError: 'x'"


def test_a_response_that_could_not_be_generated_is_a_failure_but_not_a_call_of_a_reward() -> None:
    """Otherwise a few of them would look like a reward of which every call fails."""
    failures = Failures()
    failures.add("s/0", CombinedScore(None, {}, {GENERATION: "the prompt is too long"}))
    failures.add("s/1", combine(PROMPT, [term("a"), term("b", on_error="Skip")], [Score(1.0), ERROR]))
    assert (failures.calls, failures.errors) == ({"a": 1, "b": 1}, {GENERATION: 1, "b": 1})


def test_the_words_of_the_first_failure_are_bounded() -> None:
    failures = Failures()
    failures.add("s/1", combine(PROMPT, [term("a")], [Score(None, "x" * 10_000)]))
    assert len(failures.first) == 500


def test_a_response_outside_the_trial_neither_passes_nor_fails_it() -> None:
    combiner = Combiner([term("sometimes")], trial=1)
    for score in (ERROR, GOOD):
        combiner.combined(PROMPT, [score], in_trial=False)
    with pytest.raises(RewardFailed, match="every reward of the first 1 responses failed"):
        combiner.combined(PROMPT, [ERROR])


def test_without_a_trial_nothing_has_to_be_scored() -> None:
    combiner = Combiner([term("sometimes")])
    for _ in range(3):
        combiner.combined(PROMPT, [ERROR])


def test_only_the_first_error_of_a_kind_and_a_reward_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    combiner = Combiner([term("a"), term("b")])
    with caplog.at_level(logging.WARNING):
        for score in (ERROR, ERROR, Score(None, "Timeout: too slow")):
            combiner.combined(PROMPT, [score, ERROR])
    logged = [record.getMessage().split(" (later")[0] for record in caplog.records]
    start = "reward {} failed on prompt s/0: {}"
    assert logged == [
        start.format("a", "KeyError: 'x'"),
        start.format("b", "KeyError: 'x'"),
        start.format("a", "Timeout: too slow"),
    ]


def test_a_function_that_makes_up_kinds_of_errors_fills_neither_log_nor_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    combiner = Combiner([term("a")])
    with caplog.at_level(logging.WARNING):
        for number in range(200):
            combiner.combined(PROMPT, [Score(None, f"Kind{number}: x")])
    assert len(caplog.records) == 100


async def test_the_traceback_of_a_function_is_logged(
    build, complete, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "raising.py").write_text("def f(prompt, response, answer, metadata):\n    return {}[response]\n")
    scorer = await build({"type": "Function", "function": "raising:f"})
    with caplog.at_level(logging.WARNING):
        for text in ("first", "second"):
            assert (await scorer.score(complete(text))).value == 0.0
    [record] = caplog.records
    assert "reward Function failed on prompt s/0: KeyError: 'first'" in record.getMessage()
    assert 'raising.py", line 2, in f' in record.getMessage()


async def test_rewards_without_a_name_are_called_by_their_type_and_number(build) -> None:
    named = {"type": "ExactMatch", "name": "mine"}
    scorer = await build({"type": "ExactMatch"}, named, {"type": "ExactMatch"})
    assert [reward.name for reward in scorer.scorer.rewards] == ["ExactMatch-1", "mine", "ExactMatch-2"]
    assert [term.name for term in (await build({"type": "ExactMatch"}, named)).combiner.terms] == ["ExactMatch", "mine"]


async def test_two_rewards_of_one_name_are_refused(build) -> None:
    with pytest.raises(RewardSetupError, match="two rewards are named ExactMatch"):
        await build({"type": "ExactMatch"}, {"type": "Math", "name": "ExactMatch"})


@pytest.mark.parametrize(("kind", "needs"), [("Math", True), ("ExactMatch", True), ("Gym", False), ("Function", False)])
def test_answers_are_needed_by_the_rewards_that_compare(kind: str, needs: bool) -> None:
    assert needs_answers([RewardSpec.model_validate({"type": kind})]) is needs


@given(
    st.lists(
        st.lists(st.sampled_from([Score(0.0), Score(1.0), Score(0.5), ERROR]), min_size=2, max_size=2), max_size=20
    )
)
def test_each_response_of_a_group_gets_what_it_would_get_alone(scores: list[list[Score]]) -> None:
    terms = [term("a", 2.0), term("b", -1.0, on_error="Skip")]
    alone = tuple(Combiner(terms).combined(PROMPT, each) for each in scores)
    assert Combiner(terms).combined_group(PROMPT, scores) == alone
