"""ExactMatch: the response, or a part of it, is the answer."""

from collections.abc import Callable
from dataclasses import dataclass

from qwen35_trainer.rewards.base import Completion, required_answer
from qwen35_trainer.rewards.extract import extractor


@dataclass(frozen=True)
class ExactMatch:
    """1 if the texts are equal, white space around them aside, else 0. `grade`: from `grader`."""

    name: str
    weight: float
    grade: Callable[[str, str], float]

    async def score(self, completion: Completion) -> float:
        return self.grade(completion.text, required_answer(completion))

    def close(self) -> None:
        """Nothing runs beside this process."""


def grader(extract: str | None) -> Callable[[str, str], float]:
    """The function of (response, answer)."""
    extracted = extractor(extract)

    def grade(response: str, answer: str) -> float:
        found = extracted(response)
        return float(found is not None and found.strip() == answer.strip())

    return grade
