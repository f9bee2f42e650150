"""Gym: scores a response with the reasoning-gym task that generated the prompt."""

import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.reward import Response, RewardError

type GymFields = Mapping[str, object]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class GymReward:
    """Reward that is the score of the reasoning-gym task that generated the prompt. Most scores are between 0 and 1.

    The task gets the text in the last <answer> … </answer> of the response, or the whole response if it has none. The
    task runs in a worker process, because several tasks evaluate expressions that the model wrote.
    """

    name: str
    isolated: IsolatedFunction
    concurrent: ClassVar[bool] = True

    async def score(self, response: Response) -> float:
        return await self.isolated.call(response.prompt.id, response.prompt.content, response.text)

    async def close(self) -> None:
        await self.isolated.close()


def grader(gyms: Sequence[GymFields]) -> Callable[[str, bytes, str], object]:
    """Return a function that scores (id of the prompt, its pickled content, response). For use in a worker process.

    gyms: the settings of gym sources whose tasks are loaded immediately. Other tasks are loaded when they are first
    used. The returned function raises RewardError if the prompt does not come from a gym source.
    """
    from qwen35_trainer.data.gym_prompts import create_task
    from qwen35_trainer.manifest.data import GymSpec  # slow to import, only in the process of the function

    @cache
    def task(fields: str) -> Any:  # noqa: ANN401  # reasoning-gym is untyped
        gym = GymSpec.model_validate_json(fields)
        return create_task(f"of task {gym.task}", gym)

    def grade(prompt: str, content: bytes, response: str) -> object:
        _, _, metadata = pickle.loads(content)  # noqa: S301  # from our caller
        if not {"gym", "entry"} <= metadata.keys():
            raise RewardError(f"prompt {prompt} comes from no gym source", kind="NoGymPrompt")
        gym = task(json.dumps(metadata["gym"], sort_keys=True))
        return gym.score_answer(answer=answer_part(response), entry=metadata["entry"])

    for gym in gyms:
        task(json.dumps(gym, sort_keys=True))
    return grade


def answer_part(response: str) -> str:
    """Return the text in the last <answer> … </answer>, or the whole response if it has none, without
    surrounding white space.

    The prompts of reasoning-gym request these tags.
    """
    tagged = _ANSWER.findall(response)
    return (tagged[-1] if tagged else response).strip()
