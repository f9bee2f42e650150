"""Gym: the scorer that belongs to the reasoning-gym task of the prompt."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from qwen35_trainer.data.gym import create_task
from qwen35_trainer.rewards.base import Completion, RewardError
from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.spec.data import Gym

type GymFields = Mapping[str, object]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class GymReward:
    """The task's own score, mostly 0 to 1, of what stands in the last <answer> … </answer>, or else of all the text.

    Runs isolated: several tasks evaluate expressions that the model wrote.
    """

    name: str
    weight: float
    isolated: IsolatedFunction

    async def score(self, completion: Completion) -> float:
        prompt = completion.prompt
        if not {"gym", "entry"} <= prompt.metadata.keys():
            raise RewardError(f"prompt {prompt.id} comes from no gym source", kind="NoGymPrompt")
        return await self.isolated.call(prompt.metadata["gym"], completion.text, prompt.metadata["entry"])

    def close(self) -> None:
        self.isolated.close()


def grader(gyms: Sequence[GymFields]) -> Callable[[GymFields, str, dict[str, object]], object]:
    """The function of (gym, response, entry), for the worker process. gyms: fields of `spec.data.Gym`, loaded now."""

    @cache
    def task(fields: str) -> Any:  # noqa: ANN401  # reasoning-gym is untyped
        gym = Gym.model_validate_json(fields)
        return create_task(f"of task {gym.task}", gym)

    def grade(gym: GymFields, response: str, entry: dict[str, object]) -> object:
        return task(json.dumps(gym, sort_keys=True)).score_answer(answer=answer_part(response), entry=entry)

    for gym in gyms:
        task(json.dumps(gym, sort_keys=True))
    return grade


def answer_part(response: str) -> str:
    """The last <answer> … </answer>, as reasoning-gym's prompts ask for, or else all the text; stripped."""
    tagged = _ANSWER.findall(response)
    return (tagged[-1] if tagged else response).strip()
