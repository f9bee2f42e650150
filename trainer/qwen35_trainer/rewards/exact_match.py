"""ExactMatch: compares the response, or a part of it, with the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from qwen35_trainer.rewards.extract import extractor
from qwen35_trainer.rewards.reward import Response, required_answer


@dataclass(frozen=True)
class ExactMatch:
    """Scores 1 if response and answer are equal apart from white space around them, else 0.

    grade: the function that `grader` returned.
    """

    name: str
    grade: Callable[[str, str], float]
    concurrent: ClassVar[bool] = False

    async def score(self, response: Response) -> float:
        return self.grade(response.text, required_answer(response))

    async def close(self) -> None:
        """Do nothing: the reward has no other process."""


def grader(extract: str | None) -> Callable[[str, str], float]:
    """Return the function that scores (response, answer)."""
    extracted = extractor(extract)

    def grade(response: str, answer: str) -> float:
        extracted_text = extracted(response)
        return float(extracted_text is not None and extracted_text.strip() == answer.strip())

    return grade
