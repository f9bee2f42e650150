"""Build the rewards of a run in a scoring process, and score responses with them.

    RewardsSetup ─► build_scorer ─► Scorer ─► Reward.score of each response ─► Score
                        └─► worker processes of functions: loaded at the same time

Rewards that wait for worker processes score all responses at the same time. Rewards that compute in the scoring process
score one response after another, and regularly let other coroutines run (`Turn`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import TYPE_CHECKING, Final

from qwen35_trainer.rewards.answer_rewards import ExactMatch, Math, exact_match_grader
from qwen35_trainer.rewards.function import Function
from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.reasoning_gym import GymReward
from qwen35_trainer.rewards.reward import Response, Reward, RewardError, RewardSetupError, Score
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardSettings, RewardsSetup, settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from qwen35_trainer.manifest.rewards import RewardSpec

TURN_SECONDS: Final = 0.005


class Turn:
    """Measures how long a coroutine has computed without letting other coroutines run."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def let_others_run(self) -> None:
        """Yield to the event loop if the coroutine has computed for TURN_SECONDS; otherwise return immediately."""
        if time.perf_counter() - self._began >= TURN_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


@dataclass(frozen=True)
class Scorer:
    """All rewards of a run. It can score any number of groups at the same time."""

    rewards: Sequence[Reward]

    async def score(self, responses: Sequence[Response]) -> list[list[Score]]:
        """Return a list of scores for each response: one score per reward, in the order of `rewards`.

        Rewards that wait for other processes score all responses at the same time.
        """
        by_reward = await asyncio.gather(*(_scores(reward, responses) for reward in self.rewards))
        return [[scores[index] for scores in by_reward] for index in range(len(responses))]

    async def close(self) -> None:
        """End the worker processes of the rewards. Running calls fail."""
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


def function_errors(rewards: Sequence[RewardSpec], base: Path) -> dict[int, RewardError]:
    """Load each function of `spec.rewards` in a separate process, and return the errors by index of the reward.

    base: the manifest's folder, from which functions may be imported. The call blocks, so an event
    loop must not make it.
    """
    functions = {at: reward for at, reward in enumerate(rewards) if reward.type == "Function"}
    return asyncio.run(_function_errors(functions, base)) if functions else {}


async def _function_errors(rewards: Mapping[int, RewardSpec], base: Path) -> dict[int, RewardError]:
    async def error_of(reward: RewardSpec) -> RewardError | None:
        function = _isolated(settings_of("", reward, base), (), ProcessLimits(), None)
        assert function is not None
        try:
            await function.load()
        except RewardError as error:
            return error
        finally:
            await function.close()
        return None

    errors = await asyncio.gather(*(error_of(reward) for reward in rewards.values()))
    return {at: error for at, error in zip(rewards, errors, strict=True) if error is not None}


async def build_scorer(setup: RewardsSetup, limits: ProcessLimits, *, output: int | None = None) -> Scorer:
    """Load the functions of all rewards in worker processes, and return the scorer.

    output: file descriptor to which the functions print; None: they print to the output of this process. A Gym reward
    loads the tasks of all sources before its first call. Raises RewardSetupError with every problem.
    """
    functions = [_isolated(reward, setup.gyms, limits, output) for reward in setup.rewards]
    # All functions load at the same time.
    loading = [asyncio.create_task(function.load()) for function in functions if function is not None]
    loaded = iter(await asyncio.gather(*loading, return_exceptions=True))
    rewards: list[Reward] = []
    problems: list[str] = []
    for settings, function in zip(setup.rewards, functions, strict=True):
        try:
            if function is not None and (failure := next(loaded)) is not None:
                raise failure
            rewards.append(_reward(settings, function, setup.gyms))
        except RewardError as error:
            problems.append(f"reward {settings.name}: {error}" + indent(f"\n{error.details}", "    ").rstrip())
    if problems:
        await asyncio.gather(*(function.close() for function in functions if function is not None))
        raise RewardSetupError(problems)
    return Scorer(rewards)


def _isolated(
    reward: RewardSettings, gyms: Sequence[Mapping[str, object]], limits: ProcessLimits, output: int | None
) -> IsolatedFunction | None:
    """Return the function of a reward. The function is not loaded yet.

    Returns None for a reward that needs no process, because its calls cannot hang.
    """
    package = __name__.rpartition(".")[0]
    arguments: tuple[object, ...]
    match reward.type:
        case "Math":
            loader, arguments = f"{package}.answer_rewards:math_grader", (reward.extract,)
        case "ExactMatch":
            return None
        case "Gym":
            loader, arguments = f"{package}.reasoning_gym:grader", (tuple(gyms),)
        case "Function":
            loader, arguments = f"{package}.function:load_scorer", (reward.function, reward.base)
    return IsolatedFunction(
        loader, arguments, reward.timeout_seconds, processes=limits.functions, cores=limits.cores, output=output
    )


def _reward(
    settings: RewardSettings, isolated: IsolatedFunction | None, gyms: Sequence[Mapping[str, object]]
) -> Reward:
    """Return the reward that the settings describe.

    isolated: the loaded function of the reward; None for a reward without a process. Raises RewardError for a Gym
    reward if no source is a gym.
    """
    if settings.type == "ExactMatch":
        return ExactMatch(settings.name, exact_match_grader(settings.extract))
    assert isolated is not None, "every other type runs a function of its own"
    match settings.type:
        case "Math":
            return Math(settings.name, isolated)
        case "Gym" if not gyms:
            raise RewardError(
                "no source is a gym, so that there is no task to score with. Add one, or use another type."
            )
        case "Gym":
            return GymReward(settings.name, isolated)
        case "Function":
            return Function(settings.name, isolated)
