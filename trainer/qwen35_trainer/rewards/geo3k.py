r"""The reward of geo3k: a response reasons between <think> and </think>, and then has the right answer in \boxed{…}.

    rewards: [{type: Function, function: "qwen35_trainer.rewards.geo3k:score"}]

The reward is 0.9 for a right answer plus 0.1 for the format, as in verl's `reward_score/geo3k.py`, with two
differences. Values are compared by math-verify, as in the reward Math, instead of mathruler. The opening <think> may be
missing, because Qwen3.5's template writes it as the end of the prompt.
"""

from collections.abc import Callable, Mapping
from functools import cache

import re2

from qwen35_trainer.rewards.answer_rewards import math_grader
from qwen35_trainer.rewards.reward import RewardError

FORMAT_WEIGHT = 0.1
"""Weight of the format in the reward. The answer has the rest."""
_FORMAT = re2.compile(r"(?s)(<think>)?.*</think>.*\\boxed\{.*\}.*")
_INTEGER = re2.compile(r"\s*[-+]?[0-9]{1,18}\s*")
_BOX = r"\boxed{"


def score(prompt: object, response: str, answer: str | None, metadata: Mapping[str, object]) -> float:
    r"""Return 0.9 for a right answer in the last \boxed{…}, plus 0.1 for the format <think>…</think>…\boxed{…}.

    Raises RewardError if `answer` is None. If the text in the box differs from `answer`, both are compared as
    mathematical expressions. The comparison raises RewardError if `answer` is not an expression.
    """
    if answer is None:
        raise RewardError("the row has no answer, which the reward compares with the response", kind="NoAnswer")
    is_formatted = _FORMAT.fullmatch(response) is not None
    return (1.0 - FORMAT_WEIGHT) * _accuracy(response, answer) + FORMAT_WEIGHT * is_formatted


def _accuracy(response: str, answer: str) -> float:
    boxed = last_boxed(response)
    if boxed is None:
        return 0.0
    if boxed.strip() == answer.strip():
        return 1.0
    if _INTEGER.fullmatch(boxed) and _INTEGER.fullmatch(answer):  # without math-verify, which takes seconds to import
        return float(int(boxed) == int(answer))
    return _grader()(f"{_BOX}{boxed}}}", answer)


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last \boxed{…} of a text, including nested braces.

    Returns None if the text has no \boxed{, or if the braces of the last one do not close.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    first = start + len(_BOX)
    for at in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[first:at]
    return None


@cache
def _grader() -> Callable[[str, str], float]:
    return math_grader(None)
