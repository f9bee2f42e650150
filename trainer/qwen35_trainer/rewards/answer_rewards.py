"""Math and ExactMatch: rewards that compare a response, or what `extract` finds in it, with the reference answer.

Math         the mathematical values are equal (math-verify), in a worker process
ExactMatch   the texts are equal
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import re2

from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.reward import Response, RewardError, required_answer


@dataclass(frozen=True)
class Math:
    r"""Reward that is 1 if the final expression of the response has the same value as the reference answer, else 0.

    For example, 1/2, 0.5 and \frac{2}{4} have the same value. The comparison runs in a worker process, because
    simplifying an expression that a model wrote may never end.
    """

    name: str
    isolated: IsolatedFunction
    concurrent: ClassVar[bool] = True

    async def score(self, response: Response) -> float:
        return await self.isolated.call(response.text, required_answer(response))

    async def close(self) -> None:
        await self.isolated.close()


def math_grader(extract: str | None) -> Callable[[str, str], float]:
    """Return a function that takes (response, answer) and returns the score, 1 or 0. For use in a worker process.

    extract: the pattern that finds the expression in the response; None: the whole response is searched. The returned
    function raises RewardError if the answer is not a mathematical expression.
    """
    import math_verify  # two seconds to import, only in the worker

    # The time-outs of math-verify are off, because they use signals and guard only single steps. It warns about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    extracted = extractor(extract)

    def equal(gold: list[object], text: str) -> bool:
        return bool(math_verify.verify(gold, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None))

    def grade(response: str, answer: str) -> float:
        # In a box, because math-verify reads bare LaTeX as text: x^2+1 would not be an expression, and 5\% would be 5.
        gold = math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
        if not gold:
            raise RewardError(f"the answer {answer[:200]!r} is not a mathematical expression", kind="UnreadableAnswer")
        extracted_text = extracted(response)
        if extracted_text is None:
            return 0.0
        return float(any(equal(gold, text) for text in _readings(extracted_text, whole=extract is None)))

    return grade


def _readings(extracted_text: str, *, whole: bool) -> list[str]:
    """Return the texts to parse with math-verify. The response is correct if one of them has the same
    value as the answer.

    whole: whether `extracted_text` is the whole response; otherwise it is the expression that `extract` found.
    """
    if not whole:
        # The extracted text is the expression, without a box, like the answer.
        return [rf"\boxed{{{extracted_text}}}"]
    last_box = extracted_text.rfind(r"\boxed")
    if last_box > extracted_text.find(r"\boxed"):
        # math-verify reads several boxes as a set of solutions. The last box may also be a corrected answer.
        return [extracted_text, extracted_text[last_box:]]
    return [extracted_text]


@dataclass(frozen=True)
class ExactMatch:
    """Reward that is 1 if the response, or what `extract` finds in it, equals the reference answer, else 0.

    White space at the beginning and the end is ignored. grade: a function from `exact_match_grader`.
    """

    name: str
    grade: Callable[[str, str], float]
    concurrent: ClassVar[bool] = False

    async def score(self, response: Response) -> float:
        return self.grade(response.text, required_answer(response))

    async def close(self) -> None:
        """Do nothing, because this reward has no worker process to end."""


def exact_match_grader(extract: str | None) -> Callable[[str, str], float]:
    """Return a function that takes (response, answer) and returns the score, 1 or 0.

    extract: the pattern that finds the text to compare in the response; None: the whole response is compared. Raises
    RewardError for a pattern that RE2 does not accept.
    """
    extracted = extractor(extract)

    def grade(response: str, answer: str) -> float:
        extracted_text = extracted(response)
        return float(extracted_text is not None and extracted_text.strip() == answer.strip())

    return grade


def extractor(pattern: str | None) -> Callable[[str], str | None]:
    """Return a function that extracts the last match of `pattern` from a response.

    The function returns the first group of the match, or the whole match if the pattern has no group, or None if
    nothing matches. If `pattern` is None, the function returns the whole response. The last match counts, because a
    model that reasons first gives its answer at the end. RE2 matches in time that is linear in the length of the
    response. Raises RewardError for a pattern that RE2 does not accept.
    """
    if pattern is None:
        return lambda response: response
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options=options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
        raise RewardError(
            f"extract {pattern!r} is not an RE2 expression: {reason}. RE2 has no look-around and no back-references."
        ) from error

    def extract(response: str) -> str | None:
        last = None
        for last in compiled.finditer(response):  # noqa: B007  # the last match is the result
            pass
        return None if last is None else last[1 if compiled.groups else 0]

    return extract
