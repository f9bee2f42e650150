"""Scores responses with all rewards of a run, in a scoring process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_trainer.rewards.reward import Response, Reward, RewardError, Score
from qwen35_trainer.rewards.turn import Turn


@dataclass(frozen=True)
class Scorer:
    """Scores any number of groups of responses at the same time."""

    rewards: Sequence[Reward]

    async def score(self, responses: Sequence[Response]) -> list[list[Score]]:
        """Return the scores of each response: one of each reward, in order. Rewards that wait run at the same time."""
        by_reward = await asyncio.gather(*(_scores(reward, responses) for reward in self.rewards))
        return [[scores[index] for scores in by_reward] for index in range(len(responses))]

    async def close(self) -> None:
        """End the processes of the rewards. Calls under way fail."""
        await asyncio.gather(*(reward.close() for reward in self.rewards))


async def _scores(reward: Reward, responses: Sequence[Response]) -> list[Score]:
    if reward.concurrent:
        return await asyncio.gather(*(_score(reward, response) for response in responses))
    turn, scores = Turn(), []
    for response in responses:
        scores.append(await _score(reward, response))
        await turn.let_others_run()
    return scores


async def _score(reward: Reward, response: Response) -> Score:
    try:
        return Score(await reward.score(response))
    except RewardError as error:
        return Score.failed(error)
