"""The reward of geo3k: what a boxed answer and the format of the reasoning are worth."""

import pytest

from qwen35_trainer.rewards.answer_rewards import math_grader
from qwen35_trainer.rewards.function import load_function
from qwen35_trainer.rewards.geo3k import last_boxed, score
from qwen35_trainer.rewards.reward import RewardError


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"<think>3 and 4</think> \boxed{5}", "5", 1.0),
        (r"3 and 4</think>, so \boxed{5}.", "5", 1.0),  # the template has opened the reasoning
        ("<think>3\nand\n4</think>\n\\boxed{\\frac{10}{2}}", "5", 1.0),
        (r"<think></think>\boxed{4} or rather \boxed{5}", "5", 1.0),
        (r"\boxed{5}", "5", 0.9),
        (r"<think>\boxed{5}</think>", "5", 0.9),  # the answer is not behind the reasoning
        (r"<think></think>\boxed{6}", "5", 0.1),
        (r"<think></think>\boxed{5} or rather \boxed{4}", "5", 0.1),
        (r"<think></think> 5", "5", 0.0),
        ("", "5", 0.0),
        (r"<think></think>\boxed{2 \sqrt { 221 }}", r"2 \sqrt { 221 }", 1.0),
        (r"<think></think>\boxed{\sqrt{884}}", r"2 \sqrt { 221 }", 1.0),
        (r"<think></think>\boxed{0.5}", r"\frac { 1 } { 2 }", 1.0),
        (r"<think></think>\boxed{CD}", "CD", 1.0),
        (r"<think></think>\boxed{5", "5", 0.0),
    ],
)
def test_the_answer_counts_nine_tenths_and_the_format_one(response: str, answer: str, expected: float) -> None:
    assert score("a question", response, answer, {}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("boxed", "answer"), [("05", "5"), ("+5", "5"), ("-5", "5"), ("6", "5"), (" 5 ", "5"), ("-0", "0")]
)
def test_integers_are_compared_as_math_verify_does(boxed: str, answer: str) -> None:
    expected = math_grader(None)(rf"\boxed{{{boxed}}}", answer)
    assert score("a question", rf"\boxed{{{boxed}}}", answer, {}) == pytest.approx(0.9 * expected)


def test_a_row_without_an_answer_is_an_error() -> None:
    with pytest.raises(RewardError, match="the row has no answer"):
        score("a question", r"\boxed{5}", None, {})


def test_boxes_are_read_to_their_own_end() -> None:
    assert last_boxed(r"\boxed{a {b} c} d} \boxed{}") == ""
    assert last_boxed(r"x \boxed{\frac{1}{2}} y") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{{}") is None
    assert last_boxed("no box") is None


def test_the_manifest_can_name_it() -> None:
    assert load_function("qwen35_trainer.rewards.geo3k:score", ".") is score
