"""Gym: scores a response with the reasoning-gym task that generated the prompt."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from qwen35_trainer.data.gym_prompts import create_task
from qwen35_trainer.manifest.data import GymSpec
from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.reward import Response, RewardError

type GymFields = Mapping[str, object]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class GymReward:
    """Scores a response with the reasoning-gym task of its prompt. Most scores are between 0 and 1.

    The task gets the text in the last <answer> … </answer>, or the whole response if there is none. It runs in a worker
    process, because several tasks evaluate expressions of the model.
    """

    name: str
    weight: float
    isolated: IsolatedFunction

    async def score(self, response: Response) -> float:
        prompt = response.prompt
        if not {"gym", "entry"} <= prompt.metadata.keys():
            raise RewardError(f"prompt {prompt.id} comes from no gym source", kind="NoGymPrompt")
        return await self.isolated.call(prompt.metadata["gym"], response.text, prompt.metadata["entry"])

    def close(self) -> None:
        self.isolated.close()


def grader(gyms: Sequence[GymFields]) -> Callable[[GymFields, str, dict[str, object]], object]:
    """Return a function that scores (gym, response, entry) in the worker process.

    gyms: the sources whose tasks are loaded immediately. Other tasks are loaded when they are first used.
    """

    @cache
    def task(fields: str) -> Any:  # noqa: ANN401  # reasoning-gym is untyped
        gym = GymSpec.model_validate_json(fields)
        return create_task(f"of task {gym.task}", gym)

    def grade(gym: GymFields, response: str, entry: dict[str, object]) -> object:
        return task(json.dumps(gym, sort_keys=True)).score_answer(answer=answer_part(response), entry=entry)

    for gym in gyms:
        task(json.dumps(gym, sort_keys=True))
    return grade


def answer_part(response: str) -> str:
    """Return the text in the last <answer> … </answer>, or the whole response if there is none.

    The prompts of reasoning-gym require these tags. White space around the text is removed.
    """
    tagged = _ANSWER.findall(response)
    return (tagged[-1] if tagged else response).strip()
