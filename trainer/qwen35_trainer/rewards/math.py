"""Math: the response gives the same mathematical value as the answer (math-verify)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from qwen35_trainer.rewards.base import Completion, RewardError, required_answer
from qwen35_trainer.rewards.extract import extractor
from qwen35_trainer.rewards.isolated import IsolatedFunction


@dataclass(frozen=True)
class Math:
    r"""1 if the expression that the response ends with equals the answer (1/2, 0.5, \frac{2}{4} …), else 0.

    Runs isolated: simplifying what a model wrote may take for ever.
    """

    name: str
    weight: float
    isolated: IsolatedFunction

    async def score(self, completion: Completion) -> float:
        return await self.isolated.call(completion.text, required_answer(completion))

    def close(self) -> None:
        self.isolated.close()


def grader(extract: str | None) -> Callable[[str, str], float]:
    """The function of (response, answer), for the worker process."""
    import math_verify  # two seconds to import, only in the worker

    # math-verify's own time-outs are off: they use signals and only guard single steps. It warns about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    extracted = extractor(extract)

    def equal(gold: list[object], text: str) -> bool:
        return bool(math_verify.verify(gold, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None))

    def grade(response: str, answer: str) -> float:
        # In a box, since math-verify reads bare LaTeX as text: x^2+1 would be no expression, and 5\% would be 5.
        gold = math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
        if not gold:
            raise RewardError(f"the answer {answer[:200]!r} is not a mathematical expression", kind="UnreadableAnswer")
        found = extracted(response)
        if found is None:
            return 0.0
        return float(any(equal(gold, text) for text in _readings(found, whole=extract is None)))

    return grade


def _readings(found: str, *, whole: bool) -> list[str]:
    """The texts to parse; one that gives the answer is enough."""
    if not whole:
        # What was extracted is the expression itself, like the answer.
        return [rf"\boxed{{{found}}}"]
    last_box = found.rfind(r"\boxed")
    if last_box > found.find(r"\boxed"):
        # Several boxes may be a set of solutions, as which math-verify reads them, or an answer that was corrected.
        return [found, found[last_box:]]
    return [found]
