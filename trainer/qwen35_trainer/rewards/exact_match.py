"""ExactMatch: the response, or a part of it, is the answer."""

from collections.abc import Callable
from dataclasses import dataclass

from qwen35_trainer.rewards.base import Completion, required_answer
from qwen35_trainer.rewards.extract import extractor
from qwen35_trainer.rewards.isolated import IsolatedFunction


@dataclass(frozen=True)
class ExactMatch:
    """1 if the texts are equal, white space around them aside, else 0. See `extract.extractor`."""

    name: str
    weight: float
    # Absent without a regular expression: a comparison cannot hang. A regular expression can.
    isolated: IsolatedFunction | None

    async def score(self, completion: Completion) -> float:
        answer = required_answer(completion)
        if self.isolated is None:
            return grader(None)(completion.text, answer)
        return await self.isolated.call(completion.text, answer)

    def close(self) -> None:
        if self.isolated is not None:
            self.isolated.close()


def grader(extract: str | None) -> Callable[[str, str], float]:
    """The function of (response, answer)."""
    extracted = extractor(extract)

    def grade(response: str, answer: str) -> float:
        found = extracted(response)
        return float(found is not None and found.strip() == answer.strip())

    return grade
