import pytest

from qwen35_trainer.rewards.answer_rewards import math_grader
from qwen35_trainer.rewards.reward import RewardError


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"so it is \boxed{42}", "42", 1.0),
        (r"so it is \boxed{41}", "42", 0.0),
        ("the answer is 1/2", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"$\frac{2}{4}$", "1/2", 1.0),
        (r"\boxed{\frac{1}{3}}", "1/2", 0.0),
        (r"\boxed{1+x^2}", "x^2+1", 1.0),
        (r"\boxed{x^2}", "x^2+1", 0.0),
        (r"first 7, then \boxed{1234}", "1,234", 1.0),
        (r"\boxed{42}", r"\boxed{42}", 1.0),
        (r"\boxed{42}", "$42$", 1.0),
        (r"\boxed{3}? No: \boxed{4}", "4", 1.0),
        (r"\boxed{3}? No: \boxed{4}", "3", 0.0),
        (r"\boxed{3} and \boxed{4}", r"\{3, 4\}", 1.0),
        (r"\boxed{3}, since 1 + 2 = 3 and not 4", "3", 1.0),
        ("it is 3, no, 4", "4", 1.0),
        ("no number at all", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_equal_values_score_one_however_they_are_written(response: str, answer: str, score: float) -> None:
    assert math_grader(None)(response, answer) == score


def test_only_what_is_extracted_counts() -> None:
    grade = math_grader("<answer>(.*?)</answer>")
    assert grade("7 or <answer>x^2 + 1</answer>, not 9", "1 + x^2") == 1.0
    assert grade("<answer>7</answer> or 42", "42") == 0.0
    assert grade("42", "42") == 0.0


def test_an_answer_that_is_not_an_expression_is_an_error_of_the_data() -> None:
    with pytest.raises(RewardError, match="the answer '' is not a mathematical expression"):
        math_grader(None)("42", "")


async def test_an_endless_simplification_is_ended_and_the_next_response_scored(build, complete) -> None:
    # Starting a worker and loading the grader have a deadline of their own: this is for the call alone, which takes milliseconds.
    scorer = await build({"type": "Math", "timeoutSeconds": 2.0})
    scored = await scorer.score(complete(r"\boxed{9^{9^{9^{9}}}+x}", "7+y"))
    assert "Timeout" in scored.errors["Math"]
    assert (await scorer.score(complete(r"\boxed{7}", "7"))).parts == {"Math": 1.0}


async def test_a_prompt_without_an_answer_is_an_error_that_names_it(build, complete) -> None:
    scored = await (await build({"type": "Math"})).score(complete(r"\boxed{7}"))
    assert scored.errors == {"Math": "NoAnswer: prompt s/0 has no answer to compare with"}
