import pytest

from qwen35_trainer.rewards.answer_rewards import exact_match_grader
from qwen35_trainer.rewards.reward import RewardSetupError


@pytest.mark.parametrize(
    ("extract", "response", "score"),
    [
        (None, " 42\n", 1.0),
        (None, "42.", 0.0),
        (None, "the answer is 42", 0.0),
        (r"\d+", "7 is wrong, it is 42", 1.0),
        (r"\d+", "42 is wrong, it is 7", 0.0),
        (r"#### (.*)", "21 + 21\n#### 42 ", 1.0),
        (r"#### (.*)", "42", 0.0),
        (r"(x)?42", "42", 0.0),
    ],
)
def test_the_last_match_is_compared_with_the_answer(extract: str | None, response: str, score: float) -> None:
    assert exact_match_grader(extract)(response, " 42 ") == score


async def test_no_response_makes_a_regular_expression_backtrack_for_ever(build, complete) -> None:
    scorer = await build({"type": "ExactMatch", "extract": "(a+)+b"})
    assert (await scorer.score(complete("a" * 100_000, "a"))).value == 0.0
    assert (await scorer.score(complete("aab", "aa"))).value == 1.0


async def test_what_re2_does_not_know_is_refused_with_the_reason(build) -> None:
    with pytest.raises(RewardSetupError, match=r"is not an RE2 expression: .* RE2 has no look-around"):
        await build({"type": "ExactMatch", "extract": r"\d(?=x)"})
